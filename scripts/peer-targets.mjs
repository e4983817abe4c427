// The targets of baton beside vllm-router, and how they are read from the results of the performance kit.

const perRequest = { unit: 'ms', of: (r) => (r.OK > 0 ? (1000 * r.target_cpu_s) / r.OK : undefined) };
const perEvent = { unit: 'µs', of: (r) => (r.events > 0 ? (1e6 * r.target_cpu_s) / r.events : undefined) };
/** Over that of no router in the same repetition. */
const addedTtft = {
  unit: 'ms',
  of: (r, direct) => (direct === undefined ? undefined : r.ttft_ms.p50 - direct.ttft_ms.p50),
};
const perStream = {
  unit: 'KiB',
  // Later the process has what earlier works took.
  of: (r) => (r.rep === 1 && r.conc > 0 ? ((r.pss_peak_mb - r.pss_start_mb) * 1024) / r.conc : undefined),
};

/**
 * `must` and `stretch` are ratios to vllm-router, `reuse` the least share of prefill legs that read all of D's blocks. The
 * targets of A to D are read twice: `baton-off` asks engines for no token ids, as the peers do, and `baton` has its
 * defaults, with which every prompt may be continued, so that its ids are asked for and compared.
 */
const TARGETS = [
  ...['baton-off', 'baton'].flatMap((target) => [
    { work: 'A', what: 'CPU per JSON request, 1 KiB', target, ...perRequest, must: 0.8, stretch: 0.5 },
    { work: 'B', what: 'CPU per event, unpaced', target, ...perEvent, must: 0.6, stretch: 0.4 },
    { work: 'Bp', what: 'CPU per event, 20 ms apart', target, ...perEvent, must: 1.25, stretch: 0.9 },
    { work: 'C', what: 'CPU per JSON request, 256 KiB', target, ...perRequest, must: 0.8, stretch: 0.6 },
    { work: 'D', what: 'added TTFT p50', target, ...addedTtft, must: 1, stretch: 0.5 },
  ]),
  { work: 'E', what: 'CPU per turn, no reuse', target: 'baton-off', ...perRequest, must: 0.8, stretch: 0.5 },
  { work: 'E', what: 'CPU per turn, exact guard', target: 'baton', ...perRequest, must: 1.1, stretch: 0.8, reuse: 0.8 },
  { work: 'G', what: 'CPU per turn on 32 KiB', target: 'baton', ...perRequest, must: 2, stretch: 1.2, reuse: 0.875 },
  { work: 'F', what: 'memory per open stream', target: 'baton', ...perStream, must: 1, stretch: 60 / 88 },
];

/** Slack for turns that the end of a work cuts off. */
const REUSE_SLACK = 0.01;

/** One row for each target whose work was run. */
export function rowsOf(results) {
  return TARGETS.flatMap((row) => {
    const of = (target) => results.filter((result) => result.work === row.work && result.target === target);
    const pairs = of(row.target).flatMap((mine) => {
      const sameRun = (name) => of(name).find(({ rep }) => rep === mine.rep);
      const [peer, direct] = [sameRun('vllm-router'), sameRun('direct')];
      if (peer === undefined) return [];
      const [value, beside] = [row.of(mine, direct), row.of(peer, direct)];
      return value === undefined || beside === undefined ? [] : [{ value, beside, whole: wholeShare(mine) }];
    });
    if (pairs.length === 0) return [];
    const middle = (pick) => median(pairs.map(pick));
    const figures = { value: middle((p) => p.value), beside: middle((p) => p.beside), whole: middle((p) => p.whole) };
    return [{ ...row, ...figures, ratio: middle((p) => p.value / p.beside) }];
  });
}

/** A row of the table, with what it says about the targets. */
export function judge({ work, what, target, unit, value, beside, ratio, must, stretch, reuse, whole }) {
  const reused = reuse === undefined || whole >= reuse - REUSE_SLACK;
  const verdict = !reused || ratio > must ? 'missed' : ratio > stretch ? 'met' : 'stretch met';
  const share = reuse === undefined ? '' : `; ${percent(whole)} whole of ${percent(reuse)}`;
  const cells = [work, `${target}: ${what}`, `${digits(value)} ${unit}`, `${digits(beside)} ${unit}`];
  return `| ${[...cells, digits(ratio), `≤ ${digits(must)}`, `≤ ${digits(stretch)}`, `${verdict}${share}`].join(' | ')} |`;
}

export const measures = {
  /** Cores that other processes used while baton was measured. */
  othersCores(results) {
    const used = results
      .filter(({ target }) => target.startsWith('baton'))
      .map((result) => result.others_cpu_util)
      .toSorted((a, b) => a - b);
    const [least, middle, most] = [used.at(0), median(used), used.at(-1)].map((cores) => (cores ?? 0).toFixed(1));
    return { least, median: middle, most };
  },
};

/** Of the prefill legs that are no releases. */
function wholeShare({ stub }) {
  const legs = (stub?.prefill_legs ?? 0) - (stub?.prefill_zero ?? 0);
  return legs <= 0 ? 0 : (stub.prefill_whole ?? 0) / legs;
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const half = Math.floor(sorted.length / 2);
  return sorted.length % 2 === 1 ? sorted[half] : ((sorted[half - 1] ?? 0) + (sorted[half] ?? 0)) / 2;
}

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}
