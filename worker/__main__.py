"""The program `python -m leasehold.worker`, which runs a worker."""

import gc

if __name__ == "__main__":
    gc.disable()  # garbage collection would take a tenth of the start's CPU time; `main` enables it again
    from leasehold.worker.main import main

    main()
