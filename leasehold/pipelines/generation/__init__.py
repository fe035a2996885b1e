"""Images and videos that somebody else's service makes: submitted, polled for up to a day, stored."""
