import { meanInterval } from './intervals.ts';
import { COMPARED, type SavedResult, type Series } from './saved-result.ts';
import { ascending } from './stats.ts';

const PANEL = { width: 640, height: 220, left: 60, right: 20, top: 34, bottom: 36 } as const;
const COLOURS = ['#1f6fb4', '#c8501e'] as const;
const TICKS = 5;
const MOST_POINTS = 500;

/** A picture of two or more runs: how many requests took at most so long, or means with their 95 % intervals. */
export function plotSvg(results: readonly SavedResult[]): string {
  const panels = COMPARED.flatMap((name) => {
    const series = results.map((result) => result.series[name]);
    return series.every((each) => each !== undefined)
      ? [{ name, series: series.filter((each) => each !== undefined) }]
      : [];
  });
  const legend = results.map(
    ({ file }, at) =>
      `<rect x="${PANEL.left}" y="${10 + at * 18}" width="12" height="12" fill="${colour(at)}"/>` +
      `<text x="${PANEL.left + 18}" y="${20 + at * 18}">${escapeText(file)}</text>`,
  );
  const head = 16 + results.length * 18;
  const height = head + panels.length * PANEL.height;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${PANEL.width}" height="${height}" viewBox="0 0 ${PANEL.width} ${height}" font-family="sans-serif" font-size="12">`,
    `<rect width="100%" height="100%" fill="#fff"/>`,
    ...legend,
    ...panels.map(
      ({ name, series }, at) => `<g transform="translate(0 ${head + at * PANEL.height})">${panel(name, series)}</g>`,
    ),
    '</svg>',
    '',
  ].join('\n');
}

/** The picture as a page. */
export function plotHtml(results: readonly SavedResult[]): string {
  return `<!doctype html>\n<meta charset="utf-8">\n<title>baton bench compare</title>\n${plotSvg(results)}`;
}

function panel(name: string, series: readonly Series[]): string {
  const values = series.map((each) => (each.values === undefined ? undefined : ascending(each.values)));
  const most = Math.max(
    ...series.map(({ mean }, at) => values[at]?.at(-1) ?? meanInterval(mean)?.[1] ?? mean.mean),
    Number.MIN_VALUE,
  );
  const x = (ms: number) => (PANEL.left + (ms / most) * (PANEL.width - PANEL.left - PANEL.right)).toFixed(1);
  const y = (share: number) =>
    (PANEL.height - PANEL.bottom - share * (PANEL.height - PANEL.top - PANEL.bottom)).toFixed(1);
  const isWhole = values.every((each) => each !== undefined);
  const ticks = Array.from({ length: TICKS + 1 }, (_, at) => (most * at) / TICKS).map(
    (ms) =>
      `<line x1="${x(ms)}" y1="${y(0)}" x2="${x(ms)}" y2="${y(1)}" stroke="#ddd"/>` +
      `<text x="${x(ms)}" y="${PANEL.height - 18}" text-anchor="middle">${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)}</text>`,
  );
  const shares = (isWhole ? [0, 0.5, 1] : []).map(
    (share) =>
      `<line x1="${x(0)}" y1="${y(share)}" x2="${x(most)}" y2="${y(share)}" stroke="#ddd"/>` +
      `<text x="${PANEL.left - 6}" y="${y(share)}" text-anchor="end" dominant-baseline="middle">${share * 100} %</text>`,
  );
  const what = isWhole ? 'requests that took at most so long' : 'mean and its 95 % interval';
  const drawn = isWhole
    ? values.map((sorted, at) => curve(sorted ?? [], x, y, colour(at)))
    : series.map((each, at) => whisker(each, x, y((at + 1) / (series.length + 1)), colour(at)));
  const title = `<text x="${PANEL.left}" y="${PANEL.top - 12}" font-weight="bold">${name} (ms): ${what}</text>`;
  return [title, ...ticks, ...shares, ...drawn].join('\n');
}

function curve(
  sorted: readonly number[],
  x: (ms: number) => string,
  y: (share: number) => string,
  stroke: string,
): string {
  const step = Math.max(1, Math.ceil(sorted.length / MOST_POINTS));
  const points = sorted.flatMap((ms, at) =>
    at % step === 0 || at === sorted.length - 1
      ? [`${x(ms)},${y(at / sorted.length)}`, `${x(ms)},${y((at + 1) / sorted.length)}`]
      : [],
  );
  return `<polyline fill="none" stroke="${stroke}" stroke-width="2" points="${points.join(' ')}"/>`;
}

function whisker({ mean }: Series, x: (ms: number) => string, y: string, stroke: string): string {
  const [low, high] = meanInterval(mean) ?? [mean.mean, mean.mean];
  return (
    `<line x1="${x(Math.max(0, low))}" y1="${y}" x2="${x(high)}" y2="${y}" stroke="${stroke}" stroke-width="3"/>` +
    `<circle cx="${x(mean.mean)}" cy="${y}" r="5" fill="${stroke}"/>`
  );
}

function colour(at: number): string {
  return COLOURS[at % COLOURS.length] ?? COLOURS[0];
}

function escapeText(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
}
