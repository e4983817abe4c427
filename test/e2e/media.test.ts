import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from 'vitest';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { chatWithPlan } from '../support/conversation.ts';
import { contentOf, type Harness, post, startHarness } from '../support/harness.ts';
import { instancesOf } from '../support/instances.ts';
import { expectBreach, startOtherPrompt } from '../support/other-prompt.ts';

/** Turns with pictures: their token ids are the same whatever they show, so the ids prove nothing of them. */
const ENGINE = { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 23 };
const YAML = 'pools: {prefill: {bidirectional: on}}\n';
let harness: Harness;

beforeAll(async () => {
  harness = await startHarness({ engine: ENGINE, yaml: YAML });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

interface Message {
  readonly role: string;
  readonly content: unknown;
}

const user = (content: unknown): Message => ({ role: 'user', content });
const assistant = (content: string): Message => ({ role: 'assistant', content });
const inline = (shown: string) => `data:image/png;base64,${Buffer.from(shown).toString('base64')}`;
const picture = (url: string, text: string) =>
  user([
    { type: 'text', text },
    { type: 'image_url', image_url: { url } },
  ]);
const long = (topic: string) => `${topic} `.repeat(25);

/** One turn through baton; an engine that does everything itself must say the same. */
async function turn(messages: readonly Message[], extra: Record<string, unknown> = {}, of: Harness = harness) {
  const { conversation_id: _, ...bare } = { max_tokens: 40, ignore_eos: true, ...extra } as Record<string, unknown>;
  const body = { model: 'sim-model', messages, ...bare };
  const reply = await chatWithPlan(of.url, { ...body, ...extra });
  expect(reply.status, reply.text).toBe(200);
  const plain = await post(`${of.plain.url}/v1/chat/completions`, body);
  const [right = ''] = contentOf(plain.text).texts;
  const [text = ''] = contentOf(reply.text).texts;
  const plan = reply.headers.get('x-baton-plan') ?? '';
  const outcome = /outcome=(\w+)/.exec(plan)?.[1] ?? 'untold';
  return { text, right, outcome, matched: Number(/matched=(\d+)/.exec(plan)?.[1] ?? 0) };
}

/** The outcome of a turn whose answer was right. */
async function outcomeOf(messages: readonly Message[], extra: Record<string, unknown> = {}): Promise<string> {
  const { text, right, outcome } = await turn(messages, extra);
  expect(text).toBe(right);
  return outcome;
}

/** The messages of the next turn. */
async function goOn(messages: readonly Message[], next: Message, extra: Record<string, unknown>) {
  const { text, right, outcome } = await turn(messages, extra);
  expect(text).toBe(right);
  return { outcome, messages: [...messages, assistant(text), next] };
}

describe.each([
  ['named', false],
  ['named', true],
  ['found by its history', false],
  ['found by its history', true],
] as const)('a conversation that is %s, stream %s', (how, stream) => {
  const extra = (name: string) => ({
    stream,
    ...(how === 'named' ? { conversation_id: `${name} ${stream}` } : {}),
  });
  const about = (name: string) => long(`${name} ${how} ${stream}`);

  test('five turns about one picture: each reads what the one before left', async () => {
    let messages: readonly Message[] = [picture(inline('a cat'), about('five'))];
    const outcomes: string[] = [];
    for (let i = 0; i < 5; i++) {
      const next = await goOn(messages, user(`And then (${i})?`), extra('five'));
      outcomes.push(next.outcome);
      messages = next.messages;
    }
    expect(outcomes).toEqual(['none', 'hit', 'hit', 'hit', 'hit']);
  });

  test('the same words beside another picture are another conversation', async () => {
    const first = picture(inline('a dog'), about('other'));
    const { messages } = await goOn([first], user('What is it?'), extra('other'));
    const replaced = [picture(inline('a fox'), about('other')), ...messages.slice(1)];
    expect(await outcomeOf(replaced, extra('other'))).toBe(how === 'named' ? 'miss_mismatch' : 'miss_never');
    // What the first picture left is still there for its own.
    expect(await outcomeOf(messages, extra('other'))).toBe('hit');
  });

  test('a picture that comes later is behind all that is read', async () => {
    const started = await goOn([user(about('later'))], picture(inline('a bird'), 'This one?'), extra('later'));
    const shown = await goOn(started.messages, picture(inline('a fish'), 'Or this?'), extra('later'));
    const again = await goOn(shown.messages, user('Well?'), extra('later'));
    const last = await outcomeOf(again.messages, extra('later'));
    // Under a name, what text alone left is not kept with its words.
    const first = how === 'named' ? 'miss_mismatch' : 'hit';
    expect([shown.outcome, again.outcome, last]).toEqual([first, 'hit', 'hit']);
  });

  test('where more pictures follow, a handle is used whole or not at all', async () => {
    const begin = [picture(inline('a hill'), about('whole'))];
    await goOn(begin, user('x'), extra('whole'));
    const other = [...begin, assistant('It says nothing.')];
    const more = [...other, picture(inline('a lake'), 'And this?')];
    expect(await outcomeOf(more, extra('whole'))).toBe('miss_mismatch');
    // Without one it is read up to the reply that was changed.
    const { text, right, outcome, matched } = await turn([...other, user('And?')], extra('whole'));
    expect({ text, outcome }).toEqual({ text: right, outcome: 'hit_cut' });
    expect(matched).toBeGreaterThan(64);
  });

  test('a reply about a picture is generated again', async () => {
    const messages = [picture(inline('a road'), about('again'))];
    await turn(messages, extra('again'));
    expect(await outcomeOf(messages, { ...extra('again'), seed: 4 })).toBe('hit_cut');
  });

  test('an exchanged picture among several, or their order, is not what was read', async () => {
    const both = (a: string, b: string) =>
      user([
        { type: 'text', text: about('pair') },
        ...[a, b].map((shown) => ({ type: 'image_url', image_url: { url: inline(shown) } })),
      ]);
    const { messages } = await goOn([both('left', 'right')], user('Which?'), extra('pair'));
    const lost = how === 'named' ? 'miss_mismatch' : 'miss_never';
    expect(await outcomeOf([both('right', 'left'), ...messages.slice(1)], extra('pair'))).toBe(lost);
    expect(await outcomeOf([both('left', 'left'), ...messages.slice(1)], extra('pair'))).toBe(lost);
    expect(await outcomeOf(messages, extra('pair'))).toBe('hit');
  });

  test('with members that change what pictures are made into, nothing is kept or read', async () => {
    const kwargs = { mm_processor_kwargs: { min_pixels: 4 } };
    const begin = [picture(inline('a tree'), about('kwargs'))];
    const first = await goOn(begin, user('Why?'), { ...extra('kwargs'), ...kwargs });
    const second = await goOn(first.messages, user('How?'), extra('kwargs'));
    expect([first.outcome, second.outcome]).toEqual(['none', 'miss_unsupported']);
    expect(await outcomeOf(second.messages, { ...extra('kwargs'), ...kwargs })).toBe('miss_unsupported');
    expect(await outcomeOf(second.messages, extra('kwargs'))).toBe('hit');
  });
});

/** The URL of a server whose pictures show what `shown` says of their paths. */
async function pictures(shown: (path: string) => string): Promise<string> {
  const server = createServer(({ url = '' }, response) => response.end(shown(url))).listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => void server.close());
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

test('what a link leads to is read by each engine for itself: nothing is reused', async () => {
  let shown = 'morning';
  const url = `${await pictures(() => shown)}/webcam`;
  const extra = { conversation_id: 'linked' };
  const first = await goOn([picture(url, long('webcam'))], user('And now?'), extra);
  shown = 'evening';
  const second = await goOn(first.messages, user('And now?'), extra);
  expect([first.outcome, second.outcome]).toEqual(['none', 'miss_unsupported']);
  // Nor beside one that is inline.
  const both = [picture(inline('noon'), long('both'))];
  const begun = await goOn(both, picture(url, 'The same?'), { conversation_id: 'both' });
  expect(await outcomeOf(begun.messages, { conversation_id: 'both' })).toBe('miss_unsupported');
});

test('prompts with pictures are rendered by the engines, and what they tell of them is compared', async () => {
  const { messages } = await goOn([picture(inline('a map'), long('map'))], user('Where?'), {});
  expect(await outcomeOf(messages)).toBe('hit');
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, leakedPins: 0, hung: 0 });
  }
});

describe('an engine renders another prompt', () => {
  const OTHER_SIM = { engine: ENGINE, yaml: YAML };
  const reversed = (messages: readonly Message[]) =>
    messages.map(({ role, content }) =>
      typeof content === 'string' ? { role, content: [...content].reverse().join('') } : { role, content: 'other' },
    );

  async function startWith(pool: 'prefill' | 'decode', isOther: () => boolean) {
    const engines = await startHarness({ ...OTHER_SIM, prefill: 2, decode: 2 });
    onTestFinished(() => engines[Symbol.asyncDispose]());
    const front = await startOtherPrompt(engines[pool][0]?.url ?? '', ({ messages }) =>
      isOther() ? reversed(messages) : undefined,
    );
    onTestFinished(() => front[Symbol.asyncDispose]());
    const urls = (role: 'prefill' | 'decode') =>
      role === pool ? [front.url, engines[role][1]?.url ?? ''] : engines[role].map(({ url }) => url);
    const flags = { prefill: urls('prefill'), decode: urls('decode') };
    const baton = await startHarness({ ...OTHER_SIM, prefill: 0, decode: 0, flags });
    onTestFinished(() => baton[Symbol.asyncDispose]());
    await expect
      .poll(async () => (await instancesOf(baton)).every(({ state }) => state === InstanceState.READY))
      .toBe(true);
    return { baton, front };
  }

  test('prefill, beside a handle: it is drained, another one answers', async () => {
    let isOther = false;
    const { baton, front } = await startWith('prefill', () => isOther);
    const begun = await Promise.all(
      ['a', 'b', 'c'].map(async (name) => {
        const messages = [picture(inline(name), long(`breach ${name}`))];
        const { text } = await turn(messages, {}, baton);
        return [...messages, assistant(text), user('And then?')];
      }),
    );
    isOther = true;
    for (const messages of begun) {
      const { text, right } = await turn(messages, {}, baton);
      expect(text).toBe(right);
    }
    await expectBreach(baton, front.url);
  });

  test.each([
    ['inline', false],
    ['inline', true],
    ['linked', false],
    ['linked', true],
  ] as const)(
    'decode, %s picture, stream %s: nothing of its reply is shown, another one answers',
    async (how, stream) => {
      const { baton, front } = await startWith('decode', () => true);
      const server = await pictures((path) => path);
      for (const name of ['a', 'b']) {
        const url = how === 'inline' ? inline(name) : `${server}/${name}`;
        const { text, right } = await turn([picture(url, long(`decodes ${name}`))], { stream }, baton);
        expect(text).toBe(right);
      }
      await expectBreach(baton, front.url);
    },
  );
});

test('without the guard the second picture gets the answer of the first', async () => {
  const flags = { 'reuse-guard': 'off', 'unsafe-reuse': 'true' };
  const unsafe = await startHarness({ prefill: 1, decode: 1, engine: ENGINE, yaml: YAML, flags });
  onTestFinished(() => unsafe[Symbol.asyncDispose]());
  await unsafe.ready();
  // Fewer tokens than these an engine would compute rather than read.
  const extra = { conversation_id: 'unsafe', max_tokens: 120 };
  const { text } = await turn([picture(inline('a dog'), long('dog'))], extra, unsafe);
  const replaced = [picture(inline('a fox'), long('dog')), assistant(text), user('What is it?')];
  const second = await turn(replaced, extra, unsafe);
  expect(second.outcome).toBe('hit');
  expect(second.text).not.toBe(second.right);
  expect(unsafe.prefill[0]?.state().mismatchedPulls).toBe(1);
});
