"""The API's operations that the load asks for, after whose commits an API is killed (F34)."""

from __future__ import annotations

#: By operation: after how many of its commits at most; every run asks so often. A first commit reserves the key of a
#: request, the second has the work and the stored answer.
OPERATIONS = {
    "createUploadUrl": 2,
    "completeUpload": 1,
    "createConversion": 3,  # the announced upload, the key, the job
    "cancelConversion": 1,
    "generateImages": 2,
    "cancelImages": 1,
    "createRun": 3,
    "api_submissions": 1,  # runs without a key, of several requests in one commit
    "createRuns": 2,
    "cancelRun": 2,
    "cancelJob": 2,
    "retryRun": 1,
    "retryJob": 1,
    "createOperation": 2,
    "signalRun": 2,
    "replayDeadLetter": 1,
    "replayDeadLetters": 2,
    "rerunRun": 2,
    "createSchedule": 2,
    "changeSchedule": 1,
    "deleteSchedule": 1,
    "runScheduleNow": 2,
    "backfillSchedule": 2,
    "claimExternal": 3,
    "heartbeatExternal": 2,
    "progressExternal": 2,
    "failExternal": 1,
    "completeExternal": 2,
    "setLimit": 2,
    "liftLimit": 1,
    "createWebhook": 2,
    "changeWebhook": 1,
    "rotateWebhookSecret": 2,
    "deleteWebhook": 1,
    "createTemplate": 2,
    "enableTemplate": 1,
    "pauseQueue": 1,
    "resumeQueue": 1,
    "api": 3,  # beside requests: what was announced leaves the outbox, the exporter's lead
}
#: Operations that are no GET and have no kill point in a plan, each with its reason.
SPARED = {
    "postImagesQuery": "it reads",
    "postVideoQuery": "it reads",
    "generateVideo": "the function of generateImages",
    "cancelVideo": "the function of cancelImages",
    "acknowledgeCancelExternal": "a run's cancels meet an external task by chance",
    "deleteJob": "as deleteMedia",
    "deleteMedia": "the load deletes nothing that the checker must find",
    "uploadSourceImages": "the load's generations have no source images",
    "announceExternalFiles": "the load's external steps make no files",
    "promoteConversion": "the load has nowhere to promote to",
    "testWebhook": "the load's webhooks get messages enough",
    "redeliverWebhook": "as testWebhook",
    "rotateCallbackSecret": "as rotateWebhookSecret",
    "createKey": "the stack makes its keys before the load",
    "rotateKey": "as createKey",
    "expireKey": "as createKey",
    "revokeKey": "as createKey",
    "changePerson": "nobody signs in to the load's console",
    "endSessions": "as changePerson",
    "settleJob": "the load's providers honour tokens: no outcome is unknown",
    "settleJobs": "as settleJob",
    "drainWorker": "F10 drains workers by signal",
}
