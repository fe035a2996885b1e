"""Which test runs which line: `plugin` is loaded by pytest, `processes` by the processes that tests start."""
