"""Which scope opens which operation: this table, and no other scope. The API is asked, not its declarations."""

from __future__ import annotations

import pytest

from leasehold.api.app import make_app
from leasehold.api.auth import security
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of
from tests.api.media_api import problem

SCOPES = {str(value) for name, value in vars(security).items() if name.isupper() and ":" in str(value)}
DOCUMENT = make_app(Settings(_env_file=None)).openapi()
OPERATIONS = {
    operation["operationId"]: (method.upper(), path)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
#: Written by hand, and asked of the API: what a route declares is what is tried here.
OPENS: dict[str, str] = {
    "media:write": "createUploadUrl completeUpload deleteMedia",
    "media:read": "getMedia streamMediaEvents",
    "runs:write": """createRun createRuns cancelRun signalRun rerunRun retryRun createSchedule changeSchedule
        deleteSchedule backfillSchedule runScheduleNow replayDeadLetter replayDeadLetters""",
    "runs:read": """listRuns getRun streamRunEvents explainRun listSchedules getSchedule listTemplates
        listTemplateVersions getTemplate listDeadLetters groupDeadLetters readRunLogs readRunStream""",
    "jobs:read": """getUsage listUnsettled listJobs getJob explainJob streamJobEvents readJobLogs readJobStream
        listDeadLetters groupDeadLetters listOperations getOperation listRefusals listViews""",
    "jobs:operate": """settleJob settleJobs cancelJob retryJob replayDeadLetter replayDeadLetters createOperation
        saveView deleteView""",
    "jobs:delete": "deleteJob createOperation",
    "templates:write": "createTemplate enableTemplate deleteTemplate",
    "external:work": """claimExternal heartbeatExternal progressExternal completeExternal failExternal
        acknowledgeCancelExternal announceExternalFiles logExternal emitExternal releaseExternal""",
    "webhooks:write": """listWebhooks createWebhook changeWebhook deleteWebhook rotateWebhookSecret listDeliveries
        testWebhook redeliverWebhook rotateCallbackSecret""",
    "conversion:write": "createConversion cancelConversion promoteConversion",
    "conversion:read": "listConversions getConversion getConversionResult streamConversionEvents",
    "generation:write": "generateImages generateVideo cancelImages cancelVideo uploadSourceImages",
    "generation:read": """queryImages queryVideo postImagesQuery postVideoQuery streamImagesEvents streamVideoEvents
        generationStatistics""",
    "keys:write": "listKeys createKey rotateKey expireKey revokeKey",
    "people:write": "listPeople changePerson endSessions",
    "audit:read": "listAudit exportAudit",
    "fleet:operate": "listQueues pauseQueue resumeQueue listWorkers drainWorker listLimits setLimit liftLimit "
    "getScaling listCells findInCells getOwnCell findInOwnCell",
}
#: The scopes of each operation, any one of which opens it.
NEEDS = {
    operation: {scope for scope, operations in OPENS.items() if operation in operations.split()}
    for operation in " ".join(OPENS.values()).split()
}


def test_each_operation_of_the_contract_stands_in_the_table() -> None:
    assert NEEDS.keys() == OPERATIONS.keys()
    assert OPENS.keys() == SCOPES


@pytest.mark.parametrize("scope", sorted(SCOPES))
async def test_a_scope_opens_its_operations_and_all_others_together_do_not(
    api: Running, make_key: MakeKey, scope: str
) -> None:
    only = await make_key(scopes=(scope,))
    async with client_of(api.url, only.text) as opened, client_of(api.url) as anybody:
        for operation in OPENS[scope].split():
            method, path = OPERATIONS[operation]
            at = path.replace("{", "").replace("}", "")  # names nothing
            others = await make_key(scopes=tuple(sorted(SCOPES - NEEDS[operation])))
            closed = {"Authorization": f"Bearer {others.text}"}
            problem(await anybody.request(method, at, headers=closed), 403, "insufficient_scope")
            assert (await opened.request(method, at)).status_code not in (401, 403), operation
