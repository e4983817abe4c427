import { type Chance, drawBetween, drawNormal } from './chance.ts';
import { numberOf, textOf } from './json.ts';

/** Draws so many whole numbers. */
export type Distribution = (chance: Chance, count: number) => readonly number[];

const KINDS: Readonly<Record<string, (data: unknown) => Distribution>> = {
  constant: (data) => {
    const value = needed(data, 'value', 0);
    return each(() => Math.round(value));
  },
  uniform: (data) => {
    const min = needed(data, 'min', 0);
    const max = needed(data, 'max', min);
    return each((chance) => drawBetween(chance, Math.round(min), Math.round(max)));
  },
  lognormal: (data) => (numberOf(data, 'average') === undefined ? lognormal(data) : lognormalOf(data)),
  zipf: (data) => {
    const alpha = needed(data, 'alpha', 1);
    if (alpha === 1) throw new Error('alpha: expected more than 1');
    return each((chance) => drawZipf(chance, alpha), most(data));
  },
  poisson: (data) => {
    const mean = needed(data, 'alpha', 0);
    return each((chance) => drawPoisson(chance, mean), most(data));
  },
};

/** Reads a distribution as the input files of vLLM's multi-turn benchmark have it; throws what is wrong with it. */
export function readDistribution(data: unknown): Distribution {
  const name = textOf(data, 'distribution') ?? '';
  const make = Object.hasOwn(KINDS, name) ? KINDS[name] : undefined;
  if (make === undefined) throw new Error(`expected {"distribution": one of ${Object.keys(KINDS).join(', ')}, ...}`);
  return make(data);
}

function each(draw: (chance: Chance) => number, max = Number.POSITIVE_INFINITY): Distribution {
  return (chance, count) => Array.from({ length: count }, () => Math.min(max, draw(chance)));
}

function needed(data: unknown, key: string, min: number): number {
  const value = numberOf(data, key);
  if (value === undefined || value < min) throw new Error(`${key}: expected a number from ${min}`);
  return value;
}

function most(data: unknown): number {
  return numberOf(data, 'max') ?? Number.POSITIVE_INFINITY;
}

function lognormal(data: unknown): Distribution {
  const [mean, sigma, max] = [needed(data, 'mean', 0), needed(data, 'sigma', 0), most(data)];
  return each((chance) => Math.round(Math.exp(mean + sigma * drawNormal(chance))), max);
}

/** By its average, to which the draws are scaled, and the ratio of its median to it. */
function lognormalOf(data: unknown): Distribution {
  const [average, max] = [needed(data, 'average', 1), most(data)];
  const ratio = numberOf(data, 'median_ratio') ?? 0.85;
  if (ratio <= 0 || ratio >= 1) throw new Error('median_ratio: expected a number between 0 and 1');
  const sigma = Math.sqrt(-2 * Math.log(ratio));
  return (chance, count) => {
    const draws = Array.from({ length: count }, () => Math.exp(sigma * drawNormal(chance)));
    const scale = (average * count) / draws.reduce((sum, draw) => sum + draw, 0);
    return draws.map((draw) => Math.round(Math.min(max, draw * scale)));
  };
}

/** By rejection (Devroye, Non-Uniform Random Variate Generation, X.6). */
function drawZipf(chance: Chance, alpha: number): number {
  const b = 2 ** (alpha - 1);
  for (;;) {
    const x = Math.floor((1 - chance()) ** (-1 / (alpha - 1)));
    const t = (1 + 1 / x) ** (alpha - 1);
    if (x <= Number.MAX_SAFE_INTEGER && (chance() * x * (t - 1)) / (b - 1) <= t / b) return x;
  }
}

/** How many exponential times fit into one. */
function drawPoisson(chance: Chance, mean: number): number {
  let count = -1;
  for (let at = 0; at <= mean; count++) at -= Math.log(1 - chance());
  return count;
}
