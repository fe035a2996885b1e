"""The client of pictures: it gets a signed URL, uploads the picture, and completes the upload."""

from __future__ import annotations

from bench.picture import photograph
from chaos.load.diary import Diary, Sender

PICTURE_TYPE = "image/jpeg"


def picture() -> bytes:
    return photograph(400, 300)


def sender(diary: Diary) -> Sender:
    content = picture()

    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        ticket_request = {"content_type": PICTURE_TYPE, "file_name": f"{key}.jpg"}
        again = diary.is_sent_twice()
        ticket = await client.request("POST", "/upload-url", ticket_request, key=key, again=again)
        media = tuple((body["media_id"],) for body in ticket.answered)
        diary.record("upload", tenant, key, ticket, endpoint="POST /upload-url", answers=media)
        if not ticket.good or not await client.put(ticket.body["upload_url"], content, PICTURE_TYPE):
            diary.record("media", tenant, key, ticket, answer="unknown")
            return
        done = {name: ticket.body[name] for name in ("media_id", "original_key")}
        completed = await client.request("POST", "/complete-upload", done, again=diary.is_sent_twice())
        jobs = tuple((body["job_id"],) for body in completed.answered)
        job = jobs[-1][0] if jobs else ""
        diary.record("media", tenant, key, completed, job=job, endpoint="POST /complete-upload", answers=jobs)
        if job:
            diary.follow(client, job, f"/media/{done['media_id']}/events")

    return send
