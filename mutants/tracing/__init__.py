"""Records which test runs which line. pytest loads `plugin`; the processes that tests start load `processes`."""
