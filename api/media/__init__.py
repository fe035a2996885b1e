"""The media API: `/upload-url`, `/complete-upload`, `/media`."""
