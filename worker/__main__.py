"""The program `python -m leasehold.worker`, which runs a worker."""

import gc

if __name__ == "__main__":
    gc.disable()  # `main` switches it on again: collections while the modules load take a tenth of the start's CPU time
    from leasehold.worker.main import main

    main()
