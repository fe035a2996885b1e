"""An app whose tasks another module declares, which names the app only through this module."""

from leasehold import App

app = App("main")
