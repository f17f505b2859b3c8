"""Evaluate a language model on multiple-choice questions, by the log-likelihood of each choice, as lm-eval does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import pluralise
from toyexp.formats.records import decode, iter_records, read_question
from toyexp.inference.loaded_model import LoadedModel, pick_engine
from toyexp.interfaces.command import Answer
from toyexp.plugins.registry import Registry


@dataclass(frozen=True)
class ChoiceScores(Answer):
    """Accuracy of a model on multiple-choice questions."""

    file: str
    engine: str
    data: str
    questions: int
    acc: float  # share of questions whose right choice has the highest log-likelihood
    acc_bytes: float  # the same, with the log-likelihood of a choice divided by its length in bytes

    def lines(self) -> list[str]:
        """Return the lines printed to the user."""
        data = f"{self.data}, {pluralise(self.questions, 'question')}"
        lines = f"model   {self.file}", f"engine  {self.engine}", f"data    {data}"
        return [*lines, f"acc {self.acc:.4f} · acc_bytes {self.acc_bytes:.4f}"]


def score_choices(path: Path, file: str, engine: str, registry: Registry, adapter: Path | None) -> ChoiceScores:
    """Score the model at `path`, if given with a LoRA `adapter`, on the questions in the file of records `file`."""
    loaded = LoadedModel.open(path, registry, adapter)
    if not (net := loaded.model).reads.sequence:
        raise UserError(f"{loaded.name}: a {net.name} reads {net.reads} and answers no questions; leave out --choices")
    tokenizer, right, rows = loaded.tokenizer(), np.zeros(2), list[list[tuple[int, np.ndarray]]]()
    begin, questions = [tokenizer.bos] * tokenizer.add_bos, []
    for place, record in iter_records(Path(file)):
        try:
            questions.append(read_question(decode(record, {})))
        except UserError as error:
            raise UserError(f"--choices {place}: {error}") from None
    for question, choices, _ in questions:  # last spaces of a question belong to the first token of the choice
        start = len(begin) + len(tokenizer.encode(question.rstrip()))
        ids = [np.array([*begin, *tokenizer.encode(f"{question} {choice}")], np.int32) for choice in choices]
        rows.append([(max(1, min(start, len(row) - 1)), row) for row in ids])
    length = max((len(row) for rows_of_one in rows for _, row in rows_of_one), default=0)
    if not 0 < length <= net.context:
        problem = f"a question has {length} tokens; the model's context is {net.context}" if length else "is empty"
        raise UserError(f"--choices {file}: {problem}")
    chosen, note = pick_engine(engine, registry, 1)
    with loaded.session(chosen, net.reads.inputs(length), 1) as session:

        def log_likelihood(start: int, row: np.ndarray) -> float:
            targets, weights = np.zeros((2, 1, length), np.int32)
            targets[0, : len(row) - 1], weights[0, start - 1 : len(row) - 1] = row[1:], 1
            tokens = np.pad(row, (0, length - len(row)))[None]
            batch = {str(net.reads.sequence): tokens, "targets": targets, "weights": weights.astype(np.float32)}
            return -session.evaluate([batch]) * (len(row) - start)

        for (_, choices, answer), rows_of_one in zip(questions, rows, strict=True):
            sums = np.array([log_likelihood(*row) for row in rows_of_one])
            if not np.isfinite(sums).all():
                raise RunFailed(f"{loaded.name}: the log-likelihood of a choice is not finite")
            right += [np.argmax(x) == answer for x in (sums, sums / [len(choice.encode()) for choice in choices])]
    return ChoiceScores(loaded.name, note, file, len(questions), *(right / len(questions)).tolist())
