"""`python -m tests.race` finds this folder also where a package installed a `tests` of its own."""
