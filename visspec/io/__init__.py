"""Safe reading of files, and other input and output."""
