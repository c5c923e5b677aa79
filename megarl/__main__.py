"""`python -m megarl`, and the `megarl` command of an installed package."""

from megarl.cli import main

if __name__ == "__main__":
    main()
