"""The README's five lines. `leasehold dev examples.shop:app` runs them."""

from leasehold import App

app = App("shop")


@app.task
def send_receipt(order: int, email: str) -> str:
    return f"receipt {order} is on its way to {email}"
