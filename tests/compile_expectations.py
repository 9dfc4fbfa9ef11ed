"""What the report has to say of each compile case, and the same as a table for people."""

import torch
from torch.torch_version import TorchVersion

import compile_cases as cases
from compile_cases import first_line, line_of

OLD = TorchVersion(torch.__version__) < "2.12"
LIMIT = 8
"""torch's recompile limit: so many graphs of one function, then eager."""
STEP = "training_step"
EPOCHS = {"max_epochs": LIMIT + 2, "max_steps": -1, "limit_train_batches": 1, "limit_val_batches": 1}

# Case: counts that are not zero, then its events but the graphs: kind, owner, cause, line, function, count.
SETTLED = {
    cases.Prints: (
        {"graphs": 2, "graph_breaks": 1},
        [("graph_break", "user", "side_effect", line_of, STEP, 1)],
    ),
    cases.BranchesOnItem: (
        {"graphs": 4, "recompiles": 2, "graph_breaks": 1},
        [
            ("graph_break", "user", "data_dependent", line_of, STEP, 1),
            ("recompile", "user", "data_dependent", line_of, STEP, 2),
        ],
    ),
    cases.Masks: (
        {"graphs": 3, "recompiles": 1, "graph_breaks": 1},
        [
            ("graph_break", "user", "data_dependent", line_of, STEP, 1),
            ("recompile", "user", "shape", line_of, STEP, 1),
        ],
    ),
    cases.RaggedTail: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "shape", first_line, STEP, 1)],
    ),
    cases.VaryingLength: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "shape", first_line, STEP, 1)],
    ),
    cases.EveryThirdBatch: (
        {"graphs": 3, "recompiles": 2},
        [("recompile", "user", "python_scalar", line_of, STEP, 2)],
    ),
    cases.AnnealsFloat: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "python_scalar", line_of, STEP, 1)],
    ),
    cases.Recurrent: (
        {"eager_frames": 1},
        [("skipped_frame", "user", "unsupported", line_of, STEP, 1)],
    ),
    cases.FreshModule: ({"graphs": 1}, []),
    cases.FreshClosure: ({"graphs": 1}, []),
    cases.CustomFunction: ({"graphs": 1}, []),
    cases.CallsDisabled: (
        {"graphs": 2, "graph_breaks": 1},
        [("graph_break", "user", "side_effect", line_of, STEP, 1)],
    ),
    cases.CallsNumPy: (
        {"graphs": 2, "graph_breaks": 1},
        [("graph_break", "third_party", "unsupported", line_of, STEP, 2)],
    ),
    cases.CallsALibrary: (
        {"graphs": 3, "graph_breaks": 1, "eager_frames": 1},
        [
            ("graph_break", "third_party", "data_dependent", line_of, STEP, 2),
            ("skipped_frame", "third_party", "data_dependent", line_of, STEP, 1),
        ],
    ),
    cases.TensorSubclass: (
        {"eager_frames": 1},
        [("skipped_frame", "user", "unsupported", line_of, STEP, 1)],
    ),
    cases.BatchIdxInArithmetic: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "python_scalar", line_of, STEP, 1)],
    ),
    cases.MultipliesFloats: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "python_scalar", line_of, STEP, 1)],
    ),
    cases.ReadsLearningRate: (
        {"graphs": 2, "recompiles": 1},
        [("recompile", "user", "python_scalar", line_of, STEP, 1)],
    ),
    cases.CustomFunctionWithSetup: ({"graphs": 1}, []),
    cases.WeightNorm: ({"graphs": 1}, []),
    cases.SpectralNorm: ({"graphs": 1}, []),
    cases.PrintsByLightning: (
        {"graphs": 2, "graph_breaks": 1},
        [("graph_break", "lightning", "side_effect", line_of, STEP, 2)],
    ),
    cases.WatchesGradients: ({"graphs": 1}, []),
    cases.WatchesOutputs: (
        {"graphs": 2 if OLD else 3, "graph_breaks": 1},
        [("graph_break", "user", "data_dependent", line_of, "note", 2)],
    ),
    cases.LayerDrop: (
        {"graphs": 4, "recompiles": 2, "graph_breaks": 1},
        [
            ("graph_break", "user", "unsupported", line_of, STEP, 1),
            ("recompile", "user", "python_scalar", line_of, STEP, 2),
        ],
    ),
}
# Case: cause, function, what the hint must name. All of them recompile until the limit.
STORMS = {
    cases.CountsItself: ("python_scalar", STEP, "register_buffer('n'"),
    cases.CountsInAHelper: ("python_scalar", "scaled", "register_buffer('n'"),
    cases.ReadsGlobalStep: ("python_scalar", STEP, "self.global_step"),
    cases.ReadsCurrentEpoch: ("python_scalar", STEP, "self.current_epoch"),
    cases.GrowsAList: ("python_scalar", STEP, "self.losses"),
    cases.FreshClass: ("object_identity", STEP, "self.config"),
}

if OLD:  # a product of two Python floats is a constant of the graph there
    del SETTLED[cases.MultipliesFloats]
    STORMS[cases.MultipliesFloats] = ("python_scalar", STEP, "register_buffer(")


def markdown_table():
    """The cases as the table in ``docs/explain.md``."""
    rows = [(case, counts, events) for case, (counts, events) in SETTLED.items()]
    for case, (cause, function, _) in STORMS.items():
        counts = {"graphs": LIMIT, "recompiles": LIMIT, "limit_hits": 1}
        kinds = (("recompile", LIMIT), ("limit_hit", 1))
        rows.append((case, counts, [(kind, "user", cause, line_of, function, num) for kind, num in kinds]))
    lines = ["| The step | graphs | what is told: kind, owner, cause, how often |", "|---|---|---|"]
    for case, counts, events in sorted(rows, key=lambda row: bool(row[2])):
        told = "; ".join(f"`{kind}`, {owner}, `{cause}`, {num} x" for kind, owner, cause, _, _, num in events)
        lines.append(f"| {case.__doc__.splitlines()[0]} | {counts.get('graphs', 0)} | {told or 'nothing: healthy'} |")
    return "\n".join(lines)
