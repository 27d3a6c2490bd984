"""Secrets are in no file and on no screen; names that only look like a secret's keep their
values."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main
from fl_lightning.config.settings import changed_settings, flatten, settings_hash
from fl_lightning.study.execute.jobs import Job, Pool
from fl_lightning.support.redaction import redact, redact_arguments, redact_settings
from fl_lightning.tracking.mlflow_store import reason

HIDDEN = [
    "http://bob:§@h:1/x",
    "mysql+pymysql://u:§@§/§@h/db",
    "https://§@h/x",
    "http://u:§'§@h",
    "postgresql://h/db?sslpassword=§&x=1",
    "https://h/x?X-Amz-Signature=§&X-Amz-Security-Token=§&sig=§",
    'tags {"api_key": "§", "b": {"password": "§ §"}}',
    '{"api_key": {"deep": {"er": "§"}, "list": ["§", ["§"]]}, "b": 1}',
    r"{\"token\": \"§ §\", \"b\": 1}",
    "{'a': {'client_secret': 'it''§'}}",
    "{api_key: {deep: §}}",
    "apiKey: §",
    "password: 123§",
    'password="§\\"§',
    "password = '§ §",
    "os.environ['HF_TOKEN'] = '§'",
    "api key: §",
    "Authorization: Bearer §",
    "{'Authorization': 'Basic §=='}",
    "authorization=Token §",
    "curl -H 'X-Api-Key: §'",
    "it sent Bearer §§§",
    "AWS_SECRET_ACCESS_KEY=§ AWS_SESSION_TOKEN=§ MLFLOW_TRACKING_PASSWORD=§",
    "AccountName=me;AccountKey=§==;EndpointSuffix=x",
    "$ fit --x.password § --y 3 --x.token='§ §' --x.api_key=§",
    "note: the token: §",
    (
        "{'db_password_prod': '§', 'password2': '§', 'secret_value': '§', 'hf_token_write': '§', "
        "'token_prod': '§'}"
    ),
    (
        "api_key_prod=§ private_key_pem=§ passwordHash=§ master_key=§ ssh_key=§ license_key=§ "
        "Ocp-Apim-Subscription-Key: §"
    ),
    "jwt=§ pw=§ github_pat: §",
    "password=('§')",
    "auth=('user', '§')",
]
SHOWN = [
    "monkey=3 monkeys: 4",
    "keep_checkpoints: 2",
    "tokens_per_batch=512",
    "--model.tokens 512 --model.max_tokens 5",
    "author=me authors: [a, b]",
    "keys: [a, b] key=accuracy",
    "design: a@b sigma=0.5",
    "pad_token: <pad>",
    "token: 5",
    "token: null use_auth_token: true password: none",
    "http://127.0.0.1:5000/x sqlite:///mlflow.db git@github.com:a/b",
    "tokenizer=bert bypass=x compass: y secretary: Ann password_file=f path=p",
    "secret_file: f private_key_path: p password_policy=strict",
    "round 3: upload of client 4 rejected: bad",
    "hf_transformers_and_more_models hf_abc desk-lamp-with-a-number-16-on-it sk-learn-pipeline-of-mine AKIA",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_what_must_be_hidden(text: str) -> None:
    secret = "hush"
    hidden = redact(text.replace("§", secret))
    assert secret not in hidden
    assert redact(hidden) == hidden


@pytest.mark.parametrize(
    "token",
    [
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "gho_16C7e42F292c6912E7710c838347Ae178B4a",
        "github_pat_11ABCDEFG0123456789_abcdefghij",
        "hf_abcdefghijABCDEFGHIJabcdefghijABCD",
        "sk-proj-4f9QdZ1abcdefghijklmnop",
        "glpat-abc_DEF-1234567890xy",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-1234567890-abcdefghijkl",
    ],
)
def test_a_token_that_is_known_by_its_beginning_is_hidden_under_any_name(token: str) -> None:
    settings = {"tags": {"t": token, "note": f"pushed with {token}, see above"}}
    assert redact_settings(settings) == {"tags": {"t": "***", "note": "pushed with ***, see above"}}
    assert redact(f"https://host/?x={token}&y=1") == "https://host/?x=***&y=1"
    assert redact_arguments(["--trainer.tags", json.dumps({"t": token})])[1] == '{"t": "***"}'


@pytest.mark.parametrize("text", SHOWN)
def test_what_must_stay(text: str) -> None:
    assert redact(text) == text


def test_settings_keep_their_form() -> None:
    settings = {
        "tags": {
            "api_key": "hush",
            "note": "http://u:hush@h",
            "keys": ["a"],
            "json": '{"password": "hush"}',
        },
        "credentials": {"user": "hush", "pin": 1234, "on": True, "none": None},
        "passwords": ["hush", 5],
        "token": 5,
        "tokens": 512,
        "pad_token": "<pad>",
    }
    assert redact_settings(settings) == {
        "tags": {
            "api_key": "***",
            "note": "http://***@h",
            "keys": ["a"],
            "json": '{"password": "***"}',
        },
        "credentials": {"user": "***", "pin": "***", "on": True, "none": None},
        "passwords": ["***", "***"],
        "token": 5,
        "tokens": 512,
        "pad_token": "<pad>",
    }
    assert redact_settings(flatten(settings)) == flatten(redact_settings(settings)), (
        "dotted keys are those of nested ones"
    )


def test_a_prompt_is_kept_and_hashed_as_before() -> None:
    """What has a secret's own form is hidden in it too."""
    prompts = {
        "template": "Mask the token: {inputs}\npassword=\n",
        "constants": {"definition": "Find the api_key: it is secret"},
    }
    config = {
        "data": {"init_args": {**prompts, "system": "See http://u:hush@h"}},
        "trainer": {"tags": {"template": "password: hush"}},
        "model": {"init_args": {"template": "password: hush"}},
    }
    shown = redact_settings(config)
    assert shown["data"]["init_args"] == {**prompts, "system": "See http://***@h"}
    assert "hush" not in str(shown)
    assert redact_settings(flatten(config)) == flatten(shown)
    assert redact_settings({"settings": {"data.template": prompts["template"]}}) == {
        "settings": {"data.template": prompts["template"]}
    }
    masks, other = ({"data.template": f"password: {{{name}}}"} for name in ("inputs", "definition"))
    assert len(changed_settings(masks, other)) == 1
    assert changed_settings({"data.template": "password: ***"}, masks) == []
    written = {**shown, "data": {"init_args": {**shown["data"]["init_args"]}}}
    written["data"]["init_args"] |= {
        "template": redact(prompts["template"]),
        "constants": {"definition": redact(prompts["constants"]["definition"])},
    }
    assert written != shown
    assert settings_hash(flatten(written)) == settings_hash(flatten(shown))
    assert changed_settings(flatten(written), flatten(shown)) == []


def test_a_command_line() -> None:
    words = [
        "--x.password",
        "a hush",
        "--tags",
        '{"api_key": {"x": "hush"}}',
        "--t={'token': 'hush'}",
        "--y.token=a,hush}&",
    ]
    shown = redact_arguments(
        [*words, "--keys", "[a]", "--x.token", "--flag", "--model.tokens", "512"]
    )
    assert "hush" not in str(shown)
    assert len(shown) == len(words) + 6
    assert json.loads(shown[3]) == {"api_key": {"x": "***"}}
    assert shown[-6:] == ["--keys", "[a]", "--x.token", "--flag", "--model.tokens", "512"]


def test_an_error_is_redacted_before_it_is_cut() -> None:
    assert "hush" not in reason(ValueError("x" * 170 + " http://bob:hushhushhushhushhush@host"))


@pytest.mark.timeout(60)  # work of length squared would take hours
def test_long_texts_end() -> None:
    for text in (
        "a=" * 100_000,
        "x" * 10**6,
        "a: " * 100_000,
        'password="' + "x" * 10**6,
        "{" * 10**5,
        "password={" * 1000,
    ):
        redact(text)


def test_every_handler_of_the_projects_logger(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("fl_lightning")
    handler = logging.StreamHandler(sys.stdout)
    log.addHandler(handler)
    try:
        try:
            raise ValueError("no answer of http://bob:hush@h")
        except ValueError as error:
            log.exception("failed: %s, %s", error, {"token": "hush"})
    finally:
        log.removeHandler(handler)
    out = capsys.readouterr().out
    assert "hush" not in out
    assert "Traceback" in out
    assert "http://***@h" in out


def test_secrets_are_no_change_of_the_configuration() -> None:
    """Runs of before hold what is hidden today."""
    before = flatten({"model": {"api_key": "hush", "url": "http://u:hush@h", "mu": 1}})
    after = flatten(
        redact_settings({"model": {"api_key": "other", "url": "http://u:other@h", "mu": 1}})
    )
    assert changed_settings(before, after) == []
    assert settings_hash(before) == settings_hash(after)
    (change,) = changed_settings(before, {**after, "model.mu": 2})
    assert change == "model.mu: 1 -> 2"


def test_the_command_in_a_cells_log(tmp_path: Path) -> None:
    job = Job(
        "cell", ["fit", "--trainer.tags", '{"api_key": "hush"}', "--x.token=hush"], tmp_path / "log"
    )
    Pool([{}], program=(sys.executable, "-c", "pass")).run([job], lambda running, code: None)
    assert "hush" not in job.log.read_text()
    assert "--x.token" in job.log.read_text()


TINY = """
trainer: {max_rounds: 2, participation: 1.0, callbacks: [], accelerator: cpu, engine: sequential, workers: 1}
model: {class_path: FedAvg, init_args: {network: small_cnn, optimizer: {class_path: SGD, init_args: {lr: 0.05}}}}
data:
  class_path: FederatedImages
  init_args: {dataset: synthetic, num_clients: 2, partition: {class_path: IID}, synthetic_examples: 40,
    synthetic_test_examples: 20, synthetic_size: 16, synthetic_classes: 2}
"""
TAGS = json.dumps(
    {
        "api_key": "hush",
        "note": "https://bob:pa55w0rd@host/x",
        "json": '{"deep": {"token": "hush"}}',
        "team": "red",
    }
)


def files_with_secrets(folder: Path) -> list[Path]:
    return [
        p
        for p in folder.rglob("*")
        if p.is_file() and any(word in p.read_bytes() for word in (b"hush", b"pa55w0rd"))
    ]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "uri",
    ["http://bob:pa55w0rd@127.0.0.1:9/x", "sqlite:///mlflow.db"],
    ids=["dead server", "database"],
)
def test_a_run(
    uri: str,
    tmp_path: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path.parent / "tiny.yaml").write_text(TINY)
    fit = [
        "fit",
        "--config",
        str(tmp_path.parent / "tiny.yaml"),
        "--trainer.run_name",
        "r",
        "--trainer.experiment",
        "e",
    ]
    assert main([*fit, "--trainer.tags", TAGS]) == 0
    assert (
        main(
            [
                *fit,
                "--trainer.tags",
                TAGS,
                "--trainer.max_rounds",
                "3",
                "--ckpt_path",
                "last",
                "--trainer.allow_changed=true",
            ]
        )
        == 0
    )
    assert main([*fit, "--model.token", "hush", "--trainer.logger.password=hush"]) == 2
    out, err = capfd.readouterr()
    assert "error: " in err
    for secret in ("hush", "pa55w0rd"):
        assert secret not in out + err
    assert files_with_secrets(tmp_path) == []
    assert json.loads((tmp_path / "runs/e/r/metadata.json").read_text())["tags"] == {
        "api_key": "***", "note": "https://***@host/x", "json": '{"deep": {"token": "***"}}', "team": "red",
    }  # fmt: skip


@pytest.mark.slow
def test_a_study_of_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    secrets = {"data.root": "https://bob:pa55w0rd@host?token=hush"}
    study = {
        "study": "one",
        "config": "tiny.yaml",
        "seeds": [0],
        "methods": {"A": {"settings": secrets}},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://bob:pa55w0rd@127.0.0.1:9/x")
    command = [sys.executable, "-m", "fl_lightning", "sweep", "--config", "../study.yaml"]
    for _ in range(2):  # the second finds the cell finished
        done = subprocess.run(
            command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        for secret in ("hush", "pa55w0rd"):
            assert secret not in done.stdout + done.stderr
    assert "1 of 1 cells finished" in done.stdout + done.stderr
    assert len(list((tmp_path / "work/runs/one").glob("A*"))) == 1
    assert files_with_secrets(tmp_path / "work") == []


@pytest.mark.parametrize(
    "token", ["ghp_16C7e42F292c6912E7", "AKIAIOSFODNN7EXAMPLE", "hf_abcdefghijklmnop12"]
)
def test_a_token_within_a_name_is_redacted(token: str) -> None:
    assert token not in redact(f"run_{token}-seed0")
