"""The API's operations that the load asks for, after whose commits an API is killed (F34)."""

from __future__ import annotations

#: By operation: after how many of its commits at one API at most; the load asks often enough for that.
OPERATIONS = {
    "createUploadUrl": 2,  # the key is reserved, then all is written
    "completeUpload": 1,
}
