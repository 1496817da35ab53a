"""Labels of a request, as a parameter of the protocol."""

from tests.extensions.inference_protocol.requests import encoded, infer, outputs
from tests.service.fakes import on_a_loop
from tests.service.web.zero_shot import CSV, require_scores, service


@on_a_loop
async def test_labels_of_v2_are_a_parameter() -> None:
    names = [{"name": name} for name in ("label", "index", "score", "logits", "embedding")]
    response = await infer(service(), encoded(9, 60), outputs=names, parameters={"labels": CSV})
    found = outputs(response.json)
    for place, red in enumerate((9, 60)):
        rows = zip(found["label"][place], found["index"][place], found["score"][place], strict=True)
        require_scores(
            [{"label": name, "index": int(i), "score": float(s)} for name, i, s in rows], red
        )
    assert found["logits"].shape == (2, 3)
    assert found["embedding"].shape == (2, 8)
    for parameters, detail in (
        ({"labels": 7}, "labels: expected a text"),
        ({"labels": "a,b", "pool": "mean"}, "pool: does not apply together with labels"),
        ({"labels": "a,b", "top_k": 3}, "top_k 3: expected an integer from 1 to 2"),
    ):
        refusal = await infer(service(), encoded(9), parameters=parameters)
        assert refusal.status == 422
        assert detail in refusal.json["error"]
