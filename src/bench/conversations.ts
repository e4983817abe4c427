import { seededChance } from './chance.ts';
import { BYTES_PER_TOKEN, parseFile, readFile } from './dataset.ts';
import { type Distribution, readDistribution } from './distribution.ts';
import { memberOf, numberOf, textOf } from './json.ts';

/** A question, and the answer that the input has for it. */
export interface Turn {
  readonly question: string;
  /** Undefined where the conversation ends with a question, or was made up. */
  readonly answer: string | undefined;
  /** About the tokens of the answer; undefined where the conversation ends with a question. */
  readonly answerTokens: number | undefined;
}

/** A conversation to hold. */
export interface Conversation {
  readonly id: string;
  readonly turns: readonly Turn[];
}

/** What an input file says: conversations, or how to make some up. */
export type ConversationInput =
  | { readonly kind: 'list'; readonly conversations: readonly Conversation[] }
  | { readonly kind: 'made-up'; readonly plan: MadeUp };

/** How conversations are made up; a draw of `turns` counts questions and answers. */
export interface MadeUp {
  readonly count: number;
  /** What texts are cut from. */
  readonly text: string;
  readonly turns: Distribution;
  readonly commonPrefix: Distribution;
  readonly prefix: Distribution;
  readonly question: Distribution;
  readonly answer: Distribution;
}

/** Reads an input file of vLLM's multi-turn benchmark, of either kind; throws a sentence that names the file and the place. */
export function readConversations(path: string): ConversationInput {
  const data = parseFile(path, readFile(path));
  if (Array.isArray(data)) return { kind: 'list', conversations: readList(path, data) };
  if (textOf(data, 'filetype') !== 'generate_conversations') {
    throw new Error(`${path}: expected a list of conversations, or {"filetype": "generate_conversations", ...}`);
  }
  return { kind: 'made-up', plan: readPlan(path, data) };
}

function readList(path: string, data: readonly unknown[]): readonly Conversation[] {
  const ids = new Set<string>();
  if (data.length === 0) throw new Error(`${path} has no conversation`);
  return data.map((entry, index) => {
    const where = `${path}: conversation ${index + 1}`;
    const id = textOf(entry, 'id');
    const messages = memberOf(entry, 'messages');
    if (id === undefined) throw new Error(`${where}: expected an id`);
    if (ids.has(id)) throw new Error(`${where}: the id ${id} is there twice`);
    ids.add(id);
    if (!Array.isArray(messages) || messages.length === 0) throw new Error(`${where}: expected messages`);
    const texts = messages.map((message: unknown, at) => {
      const role = at % 2 === 0 ? 'user' : 'assistant';
      const content = textOf(message, 'content');
      if (content !== undefined && textOf(message, 'role') === role) return content;
      throw new Error(`${where}: message ${at + 1}: expected {"role": "${role}", "content": "a text"}`);
    });
    return { id, turns: turnsOf(texts) };
  });
}

function turnsOf(texts: readonly string[]): readonly Turn[] {
  return texts.flatMap((question, at) => {
    if (at % 2 === 1) return [];
    const answer = texts[at + 1];
    const answerTokens =
      answer === undefined ? undefined : Math.max(1, Math.round(Buffer.byteLength(answer) / BYTES_PER_TOKEN));
    return [{ question, answer, answerTokens }];
  });
}

function readPlan(path: string, data: unknown): MadeUp {
  const count = numberOf(data, 'num_conversations');
  if (count === undefined || !Number.isSafeInteger(count) || count < 1) {
    throw new Error(`${path}: num_conversations: expected a whole number from 1`);
  }
  const files = memberOf(data, 'text_files');
  if (!Array.isArray(files) || files.length === 0) throw new Error(`${path}: text_files: expected names of files`);
  const drawn = (section: string, key: string, fallback?: Distribution): Distribution => {
    const found = memberOf(memberOf(data, section), key);
    if (found === undefined && fallback !== undefined) return fallback;
    try {
      return readDistribution(found);
    } catch (error) {
      throw new Error(`${path}: ${section}.${key}: ${error instanceof Error ? error.message : String(error)}`, {
        cause: error,
      });
    }
  };
  const none: Distribution = (_, length) => Array.from({ length }, () => 0);
  return {
    count,
    text: files.map((file) => readFile(String(file))).join('\n'),
    turns: drawn('prompt_input', 'num_turns'),
    commonPrefix: drawn('prompt_input', 'common_prefix_num_tokens', none),
    prefix: drawn('prompt_input', 'prefix_num_tokens'),
    question: drawn('prompt_input', 'num_tokens'),
    answer: drawn('prompt_output', 'num_tokens'),
  };
}

/** Makes conversations up, the same for the same seed; a token is so many characters of the text. */
export function makeUp(plan: MadeUp, seed: number, charactersPerToken: number): readonly Conversation[] {
  const chance = seededChance(seed);
  let at = 0;
  const cut = (tokens: number): string => {
    const length = Math.max(0, Math.round(tokens * charactersPerToken));
    let text = '';
    // From the start again where the files are too short.
    while (text.length < length) {
      const piece = plan.text.slice(at, at + length - text.length);
      text += piece;
      at = (at + piece.length) % Math.max(1, plan.text.length);
    }
    return text;
  };
  if (plan.text === '') throw new Error('text_files: they are empty');
  const common = cut(plan.commonPrefix(chance, 1)[0] ?? 0);
  const prefixes = plan.prefix(chance, plan.count);
  return plan.turns(chance, plan.count).map((messages, index) => {
    const turns = Math.max(1, Math.ceil(messages / 2));
    const answers = plan.answer(chance, turns);
    return {
      id: `CONV_ID_${index}`,
      turns: plan.question(chance, turns).map((tokens, turn) => {
        // Its number makes a conversation unlike the others from there on.
        const own = `${index} is the number of this conversation. `;
        const before = turn === 0 ? `${common}${own}${cut(prefixes[index] ?? 0)}` : own;
        const question = `${before}${cut(tokens - own.length / charactersPerToken)}`;
        return { question, answer: undefined, answerTokens: Math.max(1, answers[turn] ?? 1) };
      }),
    };
  });
}
