import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { drawNormal, seededChance } from '../../src/bench/chance.ts';
import { bootstrap, meanInterval, meanOf, welch } from '../../src/bench/intervals.ts';
import { percentile } from '../../src/bench/stats.ts';
import { benchRun } from '../support/bench-run.ts';

const folder = mkdtempSync(join(tmpdir(), 'baton-bench-'));
afterAll(() => rmSync(folder, { recursive: true }));

function fileOf(name: string, content: unknown): string {
  const path = join(folder, name);
  writeFileSync(path, JSON.stringify(content));
  return path;
}

test('intervals of known values', () => {
  // 2.776 is the quantile of four degrees of freedom, 12.706 that of one.
  expect(meanInterval(meanOf([1, 2, 3, 4, 5]))?.[1]).toBeCloseTo(3 + (2.776 * Math.sqrt(2.5)) / Math.sqrt(5), 2);
  expect(meanInterval(meanOf([1, 3]))?.[1]).toBeCloseTo(2 + 12.706, 2);
  expect(meanInterval(meanOf([1]))).toBeUndefined();
  expect(welch(meanOf([1, 1]), meanOf([4, 4]))).toEqual([3, 3]);
  expect(welch(meanOf([1]), meanOf([4, 4]))).toBeUndefined();
  // Equal deviations and counts: 2.306 is the quantile of eight degrees of freedom.
  expect(welch(meanOf([1, 2, 3, 4, 5]), meanOf([2, 3, 4, 5, 6]))?.[0]).toBeCloseTo(1 - 2.306, 2);
});

test('an interval holds the true difference about 95 times of 100', () => {
  const chance = seededChance(2);
  const draw = (mean: number, count: number) => Array.from({ length: count }, () => mean + 10 * drawNormal(chance));
  const holds = (interval: readonly [number, number] | undefined) => interval && interval[0] <= 5 && interval[1] >= 5;
  const runs = Array.from({ length: 400 }, () => welch(meanOf(draw(50, 12)), meanOf(draw(55, 30))));
  const share = runs.filter(holds).length / runs.length;
  expect(share).toBeGreaterThan(0.91);
  expect(share).toBeLessThan(0.99);
  const medians = Array.from({ length: 20 }, () =>
    bootstrap(draw(50, 40), draw(55, 40), (sorted) => percentile(sorted, 50), chance),
  );
  expect(medians.filter(holds).length).toBeGreaterThan(15);
});

const ttfts = [0.1, 0.12, 0.14, 0.16];
const detailed = (shift: number) => ({
  completed: 4,
  failed: 1,
  request_throughput: 2 + shift,
  ttfts: [...ttfts, 9].map((ttft) => ttft + shift),
  itls: [...ttfts.map(() => [0.01, 0.01]), []],
  output_lens: [3, 3, 3, 3, 0],
  errors: ['', '', '', '', 'status 503'],
});

test('two results with the times of each request; failed ones do not count', async () => {
  const plot = join(folder, 'plot.html');
  const [a, b] = [fileOf('a.json', detailed(0)), fileOf('b.json', detailed(0.2))];
  const { code, out, err } = await benchRun(['compare', a, b, '--plot', plot]);
  expect({ code, err }).toEqual({ code: 0, err: `result: ${plot}\n` });
  const lines = out.split('\n');
  expect(lines.slice(0, 2)).toEqual([`a: ${a}`, `b: ${b}`]);
  expect(lines[3]).toMatch(/^ +a +b +b - a +from +to +change$/);
  expect(lines[4]).toMatch(
    /^Mean TTFT \(ms\) +130\.00 +330\.00 +\+200\.00 +\+155\.\d\d +\+244\.\d\d +\+153\.8 % +longer$/,
  );
  expect(lines[5]).toMatch(/^Median TTFT \(ms\) +130\.00 +330\.00 +\+200\.00 .* longer$/);
  expect(lines[7]).toMatch(/^Mean TPOT \(ms\) +10\.00 +10\.00 +[+-]?0\.00 .* no difference shown$/);
  expect(out).toMatch(/^Request throughput \(req\/s\) +2\.00 +2\.20 +\+0\.20 +\+10\.0 %$/m);
  expect(out).toContain("of means by Welch's t");
  const page = readFileSync(plot, 'utf8');
  expect(page).toMatch(/^<!doctype html>/);
  expect(page.match(/<polyline/g)).toHaveLength(6);
  expect(page).not.toMatch(/NaN|undefined|(src|href)=/);
});

test('results of vLLM without details, and turns of conversations', async () => {
  const brief = (mean: number) => ({
    completed: 100,
    mean_ttft_ms: mean,
    std_ttft_ms: 10,
    mean_tpot_ms: 5,
    std_tpot_ms: 0,
  });
  const plot = join(folder, 'plot.svg');
  const { out } = await benchRun(['compare', fileOf('c.json', brief(50)), fileOf('d.json', brief(40)), '--plot', plot]);
  expect(out).toMatch(/^Mean TTFT \(ms\) +50\.00 +40\.00 +-10\.00 +-12\.\d\d +-7\.\d\d +-20\.0 % +shorter$/m);
  expect(out).not.toMatch(/Median|E2EL/);
  expect(readFileSync(plot, 'utf8')).toMatch(/^<svg[\s\S]*mean and its 95 % interval[\s\S]*<circle[\s\S]*<\/svg>\n$/);
  const turns = (ttft: number) =>
    [1, 2, 3].map((at) => ({ ttft_ms: ttft + at, latency_ms: 90, saved_tokens: 7, tpot_ms: 1, output_num_tokens: at }));
  const told = await benchRun(['compare', fileOf('e.json', turns(10)), fileOf('f.json', turns(30))]);
  expect(told.out).toMatch(/^Mean TTFT \(ms\) +12\.00 +32\.00 .* longer$/m);
  expect(told.out).toMatch(/^Prompt tokens saved by handles +21\.00 +21\.00 +0\.00 /m);
});

test('what is no result is refused', async () => {
  const none = join(folder, 'none.json');
  expect(await benchRun(['compare', none, none])).toEqual({ code: 1, out: '', err: `baton: ${none} does not exist\n` });
  const other = fileOf('other.json', { a: 1 });
  expect((await benchRun(['compare', other, other])).err).toMatch(/other\.json: expected the JSON of --save-result/);
  expect(await benchRun(['compare', other])).toMatchObject({
    code: 2,
    err: expect.stringContaining("missing required argument 'b'"),
  });
});
