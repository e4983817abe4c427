import { readText } from '../config/load.ts';
import { type Chance, drawBetween, seededChance, shuffled } from './chance.ts';
import { memberOf, textOf } from './json.ts';
import { drawWords, type WordTokens } from './words.ts';

/** What is asked: made-up words, conversations of the ShareGPT form, or a prompt a line. */
export type Dataset =
  | {
      readonly name: 'random';
      readonly inputTokens: number;
      readonly outputTokens: number;
      /** Lengths are drawn from (1 - ratio) to (1 + ratio) times these. */
      readonly rangeRatio: number;
      readonly prefixTokens: number;
    }
  | { readonly name: 'sharegpt'; readonly path: string; readonly outputTokens: number | undefined }
  | { readonly name: 'custom'; readonly path: string; readonly outputTokens: number };

/** One request to come. */
export interface Prompt {
  readonly text: string;
  /** Tokens of the answer at most. */
  readonly outputTokens: number;
}

/** Makes `count` prompts; throws an Error whose message names the file, and the line where it can. */
export function makePrompts(dataset: Dataset, count: number, seed: number, words: WordTokens): readonly Prompt[] {
  const chance = seededChance(seed);
  if (dataset.name === 'random') return randomPrompts(dataset, count, chance, words);
  const all = dataset.name === 'sharegpt' ? readShareGpt(dataset) : readCustom(dataset);
  if (all.length === 0) throw new Error(`${dataset.path} has no prompt (--dataset-path)`);
  // The file in its order, or drawn, and once more from the start where it has too few.
  const order = dataset.name === 'sharegpt' ? shuffled(chance, all) : all;
  return Array.from({ length: count }, (_, i) => order[i % order.length]).filter((prompt) => prompt !== undefined);
}

function randomPrompts(
  dataset: Extract<Dataset, { name: 'random' }>,
  count: number,
  chance: Chance,
  words: WordTokens,
): readonly Prompt[] {
  const { inputTokens, outputTokens, rangeRatio, prefixTokens } = dataset;
  const draw = (tokens: number) =>
    Math.max(1, drawBetween(chance, Math.floor(tokens * (1 - rangeRatio)), Math.ceil(tokens * (1 + rangeRatio))));
  const prefix = prefixTokens === 0 ? [] : drawWords(chance, prefixTokens, { ...words, besides: 0 });
  return Array.from({ length: count }, () => {
    const own = drawWords(chance, draw(inputTokens), words);
    return { text: [...prefix, ...own].join(' '), outputTokens: draw(outputTokens) };
  });
}

/** About so many bytes of a text are a token. */
export const BYTES_PER_TOKEN = 4;
const SHORTEST_BYTES = 16;

function readShareGpt({ path, outputTokens }: Extract<Dataset, { name: 'sharegpt' }>): readonly Prompt[] {
  const data = parseFile(path, readFile(path));
  if (!Array.isArray(data)) throw new Error(`${path}: expected a list of conversations of the ShareGPT form`);
  return data.flatMap((entry: unknown, index) => {
    const turns = memberOf(entry, 'conversations');
    if (!Array.isArray(turns)) {
      throw new Error(`${path}: entry ${index + 1}: expected {"conversations": [{"from": ..., "value": ...}, ...]}`);
    }
    const [question, answer] = turns.map((turn) => textOf(turn, 'value'));
    // A conversation of one turn has no answer, and a very short one says little.
    if (question === undefined || answer === undefined || question.length < SHORTEST_BYTES) return [];
    const length = Math.max(1, Math.round(Buffer.byteLength(answer) / BYTES_PER_TOKEN));
    return [{ text: question, outputTokens: outputTokens ?? length }];
  });
}

function readCustom({ path, outputTokens }: Extract<Dataset, { name: 'custom' }>): readonly Prompt[] {
  return readFile(path)
    .split('\n')
    .flatMap((line, index) => {
      if (line.trim() === '') return [];
      const where = `${path}:${index + 1}`;
      const data = parseFile(where, line);
      const text = textOf(data, 'prompt');
      const tokens = memberOf(data, 'output_tokens') ?? outputTokens;
      if (text === undefined || text === '') throw new Error(`${where}: expected {"prompt": "a text"}`);
      if (typeof tokens !== 'number' || !Number.isSafeInteger(tokens) || tokens < 1) {
        throw new Error(`${where}: output_tokens: expected a whole number from 1`);
      }
      return [{ text, outputTokens: tokens }];
    });
}

/** The text of a file that a flag names; throws a sentence. */
export function readFile(path: string): string {
  const file = readText(path);
  if (file.kind === 'bad') throw new Error(file.message);
  return file.text;
}

/** Parses JSON; throws a sentence that begins with where it stands. */
export function parseFile(where: string, text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${where}: no JSON: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
}
