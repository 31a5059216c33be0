"""Run in a process of its own, where ``import saobp`` fails: loads portable folders.

    python without_saobp.py FOLDER ...

Each folder has ``inputs.pt``; the answers go to ``answers.pt`` beside it.
"""

import json
import sys
from pathlib import Path


class NoSaobp:
    """Finds no module of this project."""

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] == "saobp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoSaobp())

import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def answers(folder: Path) -> dict:
    given = torch.load(folder / "inputs.pt")
    options = given.get("options", {})
    auto = getattr(transformers, given["auto"])
    found = {}
    try:
        auto.from_pretrained(folder)
    except ValueError as problem:
        found["refusal"] = str(problem)
    model = auto.from_pretrained(folder, trust_remote_code=True, **options).eval()
    with torch.no_grad():
        output = model(**given["batch"])
    found["output"] = output[0]
    if model.can_generate():
        for name, choice in {
            "greedy": {},
            "beams": {"num_beams": 3},
            "uncached": {"use_cache": False},
        }.items():
            found[name] = model.generate(**given["batch"], max_new_tokens=10, do_sample=False, **choice)
    model.train()
    loss = model(**given["batch"])[0].float().square().mean()
    loss.backward()
    found["gradients"] = {
        name: parameter.grad for name, parameter in model.named_parameters() if ".saobp." in name
    }
    model.eval().save_pretrained(folder / "again")
    with torch.no_grad():
        again = auto.from_pretrained(folder / "again", trust_remote_code=True, **options).eval()
        found["again"] = again(**given["batch"])[0]
    if "text" in given:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        pipe = transformers.pipeline(
            given["task"], model=str(folder), tokenizer=tokenizer, trust_remote_code=True, device="cpu"
        )
        found["pipeline"] = json.dumps(pipe(given["text"]))
    found["modules"] = sorted(name for name in sys.modules if name.partition(".")[0] == "saobp")
    return found


for argument in sys.argv[1:]:
    torch.save(answers(Path(argument)), Path(argument) / "answers.pt")
