"""Files of others, read safely."""
