"""Django: a view writes an order and submits its receipt inside `transaction.atomic()`."""

import json
import os
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from leasehold import App

app = App("django_shop")
if not settings.configured:
    database = urlsplit(os.environ["SHOP_DATABASE_URL"])
    settings.configure(
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["testserver", "127.0.0.1"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",  # with psycopg 3
                "NAME": database.path[1:],
                "USER": database.username,
                "PASSWORD": database.password,
                "HOST": database.hostname,
                "PORT": database.port,
            }
        },
    )
    django.setup()


class Order(models.Model):  # type: ignore[misc]  # Django ships no types
    email = models.EmailField()

    class Meta:
        app_label = "django_shop"

    def __str__(self) -> str:
        return str(self.email)


@app.task
def send_receipt(order: int, email: str) -> str:
    return f"receipt {order} is on its way to {email}"


def place(request: HttpRequest) -> JsonResponse:
    body = json.loads(request.body)
    with transaction.atomic():
        order = Order.objects.create(email=body["email"])
        run = send_receipt.submit_in(connection, order.pk, order.email)
        if body["pieces"] < 1:
            raise ValueError("nothing is ordered: the row and the run vanish together")
    return JsonResponse({"order": order.pk, "run": str(run.id)}, status=201)


urlpatterns = [path("orders", place)]
