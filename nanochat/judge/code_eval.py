"""Measures during a run how much of the C++ that the model writes compiles and works."""
import os
from concurrent.futures import ThreadPoolExecutor

from nanochat.judge.eval_report import ALL, summarise
from nanochat.judge.evaluate import Sampling, Writer, judge_function
from nanochat.judge.judge import Judge
from nanochat.judge.problems import read_problems

MAX_TOKENS = 128
METRICS = {"compiles": "code_compiles", "pass@1": "code_pass", "bits per byte": "code_bpb"}


def evaluate_code(model, tokenizer, dist, is_cut_short):
    """Returns {metric: mean over the project's own problems}, greedy, on rank 0; {} on other ranks.

    Every rank writes all the code, so that none waits for another, and rank 0 judges it. is_cut_short(): called before
    each problem; once it returns True, on all ranks at the same problem, the result is {}.
    """
    sampling = Sampling(num_samples=0, max_tokens=min(MAX_TOKENS, model.config.max_seq_len // 2), temperature=1.0,
                        top_p=1.0, seed=0)
    writer, problems, records = Writer(model, tokenizer, dist, sampling), read_problems(), []
    for problem in problems:
        if is_cut_short():
            return {}
        records += writer.write_functions(problem)
    if dist.rank > 0:
        return {}
    with Judge() as judge, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        verdicts = pool.map(lambda problem, record: judge_function(judge, problem, record["text"]), problems, records)
        judged = [record | {"status": verdict.status} for record, verdict in zip(records, verdicts, strict=True)]
    return {METRICS[measure]: score.mean for measure, group, score in summarise(judged) if group == ALL}
