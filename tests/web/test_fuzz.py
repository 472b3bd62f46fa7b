"""The API by its own description: whatever is asked, no error of the server, and every answer as it is described.

A question has two seconds of the processor, else its process ends and the answer says so: none of these needs them.
"""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from trigrid.web.questions import QUESTIONS

TIMEOUT_S = 120
load_all_checks()


@pytest.fixture(scope="module")
def described(server: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server}/openapi.json", timeout=TIMEOUT_S)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question(described: schemathesis.BaseSchema, name: str, mode: GenerationMode) -> None:
    """Bodies that are as described, which may still make no sense, and bodies that are not."""
    cases = described[f"/api/{name}"]["POST"].as_strategy(generation_mode=mode)

    @settings(max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: schemathesis.Case) -> None:
        response = case.call(timeout=TIMEOUT_S)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        assert "takes more than" not in response.text

    ask()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_example_of_a_question(described: schemathesis.BaseSchema, name: str) -> None:
    """It has an answer, as described."""
    operation = described[f"/api/{name}"]["POST"]
    example = described.raw_schema["paths"][f"/api/{name}"]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    case = operation.Case(body=example, media_type="application/json")
    response = case.call(timeout=TIMEOUT_S)
    case.validate_response(response)
    assert response.status_code == 200
