"""`python -m visspec.toys NAME --out FOLDER`: make one of the included models again."""

from visspec.toys.recipes.recipe import main

if __name__ == "__main__":
    main()
