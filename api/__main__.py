"""The program `python -m leasehold.api`, which serves the API."""

import gc

if __name__ == "__main__":
    gc.disable()  # garbage collections during imports take 10 % of the start's CPU time; `main` enables them again
    from leasehold.api.main import main

    main()
