import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { BatonProcess } from '../support/baton-process.ts';
import { hasRealEngines, type RealEngines, realEngines } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import {
  chatBody,
  compareTurn,
  type Message,
  post,
  REAL_MODEL,
  said,
  startRealBaton,
  textOf,
  words,
} from '../support/real-turns.ts';

// Prompts with pictures on real vLLM: two P, one D, a plain instance with the same weights as the oracle.

const OUTPUT = 220;
/** Tokens of a picture, whatever it shows. */
const PICTURE = 16;

/** A picture of noise; the same seed is the same bytes. */
function picture(seed: number): string {
  let state = seed * 2654435761 + 1;
  const pixels = Buffer.alloc(56 * 56 * 3);
  for (let i = 0; i < pixels.length; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    pixels[i] = state >>> 24;
  }
  const bytes = Buffer.concat([Buffer.from('P6 56 56 255\n'), pixels]);
  return `data:image/x-portable-pixmap;base64,${bytes.toString('base64')}`;
}

function shown(seed: number, text: string): Message {
  const content = [
    { type: 'text', text },
    { type: 'image_url', image_url: { url: picture(seed) } },
  ];
  return { role: 'user', content };
}

// The engines of others have a model that they chose: BATON_REAL_PICTURES says that it sees.
const isGiven = process.env['BATON_REAL_PREFILL'] !== undefined;
const canSee = hasRealEngines() && (!isGiven || process.env['BATON_REAL_PICTURES'] === '1');

describe.runIf(canSee)('vLLM 0.33, pictures', () => {
  const log = new RealLog(`Decode to prefill, vLLM 0.33 (CPU), pictures, 2P1D, ${OUTPUT} output tokens a turn`);
  const run = Date.now();
  let engines: RealEngines;
  let baton: BatonProcess;

  beforeAll(async () => {
    engines = await realEngines({ version: '0.33', tokens: 'pictures', prefill: 2 });
    baton = await startRealBaton(engines, ['--reuse-min-saved-tokens', '0']);
  });
  afterAll(async () => {
    await baton?.[Symbol.asyncDispose]();
    await engines?.[Symbol.asyncDispose]();
    log.write();
  });

  async function turn(name: string, messages: readonly Message[], extra: Readonly<Record<string, unknown>> = {}) {
    const result = await compareTurn(engines, baton, chatBody(messages, OUTPUT), extra);
    log.push(`${name}: answer equal; ${JSON.stringify(result.numbers)}`);
    return result;
  }

  test('/tokenize renders pictures as a chat does, and their ids do not tell them apart', async () => {
    const ids = async (messages: readonly Message[]) => {
      const { text } = await post(`${engines.prefill[0]}/tokenize`, { model: REAL_MODEL, messages });
      return (JSON.parse(text) as { tokens: number[] }).tokens;
    };
    const one = [shown(1, 'Look: ')];
    const { promptIds } = await turn('one picture', one);
    expect(await ids(one)).toEqual(promptIds);
    expect(await ids([shown(2, 'Look: ')])).toEqual(promptIds);
    const bare = await ids([said('user', 'Look: ')]);
    expect(promptIds.length).toBe(bare.length + PICTURE);
    expect((await turn('another picture', [shown(2, 'Look: ')])).text).not.toBe((await turn('again', one)).text);
  });

  test.each([false, true])('five turns about one picture, stream %s', async (stream) => {
    const extra = { stream, conversation_id: `one ${stream} ${run}` };
    const messages = [said('system', words(40, 1)), shown(run + (stream ? 1 : 2), words(30, stream ? 2 : 3))];
    for (let i = 1; i <= 5; i++) {
      const { text, numbers } = await turn(`turn ${i}, stream ${stream}`, messages, extra);
      if (i > 1) {
        expect(numbers.outcome).toBe('hit');
        expect(numbers.pulled).toBeGreaterThan(0);
      }
      messages.push(said('assistant', text), said('user', words(10, 20 + i)));
    }
  });

  test('a new picture in each turn, in a conversation without a name', async () => {
    const messages = [said('user', words(40, run % 1000))];
    for (let i = 1; i <= 4; i++) {
      const { text, numbers } = await turn(`picture ${i}`, messages);
      if (i > 1) expect(numbers.outcome).toBe('hit');
      messages.push(said('assistant', text), shown(run + 10 + i, 'And this? '));
    }
  });

  test('the same words beside another picture read nothing of the first', async () => {
    const extra = { conversation_id: `other ${run}` };
    const begin = words(40, 5);
    const { text } = await turn('first picture', [shown(run + 20, begin)], extra);
    const rest = [said('assistant', text), said('user', 'What is it?')];
    const other = await turn('second picture', [shown(run + 21, begin), ...rest], extra);
    expect(other.numbers).toMatchObject({ outcome: 'miss_mismatch', pulled: 0 });
    const first = await turn('first again', [shown(run + 20, begin), ...rest], extra);
    expect(first.numbers.outcome).toBe('hit');
  });

  test('a text with the placeholder of the model takes the place of a later picture: nothing is read', async () => {
    const messages = [said('user', `${words(40, run % 997)} what is <image> for?`)];
    const { text } = await turn('placeholder', messages);
    const next = [...messages, said('assistant', text), shown(run + 30, 'For this? ')];
    const { promptIds, numbers } = await turn('placeholder, then a picture', next);
    // The engine puts the picture where the text has the placeholder, and leaves the one of the picture as it is.
    const counts = new Map<number, number>();
    for (const id of promptIds) counts.set(id, (counts.get(id) ?? 0) + 1);
    const [placeholder] = promptIds.filter((id, i) => promptIds[i + 1] === id && counts.get(id) === PICTURE + 1);
    expect(placeholder).toBeDefined();
    expect(promptIds.lastIndexOf(placeholder ?? 0)).toBeGreaterThan(promptIds.indexOf(placeholder ?? 0) + PICTURE);
    expect(numbers).toMatchObject({ outcome: 'miss_mismatch', pulled: 0 });
  });

  // The last: what it leaves in the engines is wrong.
  test('without the guard the second picture gets an answer about the first', async () => {
    await using unsafe = await startRealBaton(engines, ['--reuse-guard', 'off', '--unsafe-reuse']);
    const begin = words(40, 6);
    const extra = { conversation_id: `unsafe ${run}` };
    const ask = async (messages: readonly Message[]) => {
      const body = chatBody(messages, OUTPUT);
      const reply = await post(`${unsafe.url}/v1/chat/completions`, { ...body, ...extra });
      const right = await post(`${engines.plain}/v1/chat/completions`, body);
      return { text: textOf(reply.text), right: textOf(right.text), plan: reply.plan };
    };
    const { text } = await ask([shown(run + 40, begin)]);
    const second = await ask([shown(run + 41, begin), said('assistant', text), said('user', 'What is it?')]);
    expect(second.plan).toMatch(/outcome=hit;/);
    expect(second.text).not.toBe(second.right);
    log.push('without the guard, another picture: hit, and a wrong answer');
  });
});
