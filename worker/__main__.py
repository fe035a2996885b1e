"""The program `python -m leasehold.worker`, which runs a worker."""

import gc

if __name__ == "__main__":
    gc.disable()  # `main` enables it again: without this, garbage collection takes a tenth of the start's CPU time
    from leasehold.worker.main import main

    main()
