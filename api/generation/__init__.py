"""The generation API: `/v1/images`, `/v1/video`, `/v1/upload/images` and `/v1/generations`."""
