import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { HistoryModel } from '../support/history-model.ts';
import { hasRealEngines, type RealEngines, realEngines, realInstallation } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import {
  blockSizeOf,
  chatBody,
  compareTurn,
  type Message,
  metric,
  metricsOf,
  post,
  prefillTokens,
  type RealBaton,
  said,
  startRealBaton,
  textOf,
  words,
} from '../support/real-turns.ts';

// Clients that have never heard of baton, and histories that are not just gone on with: 2P1D, and a plain instance as the oracle.

const OUTPUT = 100;
/** Tokens of a turn that the official client asks for. */
const LONG_OUTPUT = 220;

const run = promisify(execFile);

/** Five turns of somebody who knows an OpenAI server and nothing else; prints what was said. */
const FIVE_TURNS = `
import json, sys
import openai
base, opening, output = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
messages = [{"role": "system", "content": opening}, {"role": "user", "content": "Tell me the history of relay races."}]
for turn in range(5):
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=int(output), temperature=0,
                                            stream=True, extra_body={"ignore_eos": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And after that ({turn})?"}]
print(json.dumps({"version": openai.__version__, "messages": messages[:-1]}))
`;

describe.runIf(hasRealEngines())('vLLM 0.33, bytes tokens', () => {
  let engines: RealEngines;
  const log = new RealLog('Clients that name nothing, and changed histories, vLLM 0.33 (CPU), bytes tokens, 2P1D');

  beforeAll(async () => {
    // Nothing runs out while the tests run: what a turn finds must not depend on the machine's pace.
    engines = await realEngines({ version: '0.33', tokens: 'bytes', prefill: 2, decoderTtlSeconds: 480 });
  });
  afterAll(async () => {
    await engines?.[Symbol.asyncDispose]();
    log.write();
  });

  test('the official Python client, five streamed turns: each after the first reuses', async () => {
    await using baton = await startRealBaton(engines);
    const { python } = await realInstallation('0.33', 'bytes');
    const before = await prefillTokens(engines);
    const { stdout } = await run(python, ['-c', FIVE_TURNS, `${baton.url}/v1`, words(60, 1), String(LONG_OUTPUT)]);
    const after = await prefillTokens(engines);
    const { version, messages }: { version: string; messages: Message[] } = JSON.parse(stdout);
    const requests = baton.lines.map((line) => JSON.parse(line)).filter(({ msg }) => msg === 'request');
    expect(requests.map(({ reuse = 'none' }) => reuse)).toEqual(['none', 'hit', 'hit', 'hit', 'hit']);
    const prefills = requests.map(({ prefill_instance: id }) => String(id));
    expect(new Set(prefills).size).toBe(2);
    for (const [i, { role, content }] of messages.entries()) {
      if (role !== 'assistant') continue;
      const plain = await post(`${engines.plain}/v1/chat/completions`, chatBody(messages.slice(0, i), LONG_OUTPUT));
      expect(content).toBe(textOf(plain.text));
    }
    log.push(
      `openai ${version} (Python), five streamed turns of ${LONG_OUTPUT} tokens, P ${prefills.map((id) => [...new Set(prefills)].indexOf(id) + 1).join(' ')}: ` +
        `${requests.map(({ reuse = 'none' }) => reuse).join(' ')}; all answers equal; ` +
        `${after.external_kv_transfer - before.external_kv_transfer} tokens pulled, ${after.local_compute - before.local_compute} computed`,
    );
  });

  describe.each([true, false])('stream %s', (stream) => {
    let baton: RealBaton;
    let blockSize = 0;
    beforeAll(async () => {
      // Every proven handle is used, however little it saves: what is expected follows from the history alone.
      baton = await startRealBaton(engines, ['--reuse-min-saved-tokens', '0']);
      blockSize = await blockSizeOf(engines.decode);
    });
    afterAll(async () => {
      await baton?.[Symbol.asyncDispose]();
    });

    let puts = 0;
    const model = new HistoryModel();
    const topic = (seed: number) => words(60, seed + (stream ? 100 : 200));

    /** One turn: answer, outcome and computed tokens are what the plain instance and the model say. */
    async function turn(name: string, messages: readonly Message[], conversation?: string): Promise<string> {
      const named = conversation === undefined ? {} : { conversation_id: conversation };
      const result = await compareTurn(engines, baton, chatBody(messages, OUTPUT), { stream, ...named });
      const { numbers, promptIds, replyIds, text } = result;
      const { outcome, matched } = model.take(messages, promptIds, conversation);
      expect({ outcome: numbers.outcome, matched: numbers.matched }, name).toEqual({ outcome, matched });
      expect(numbers.computed, name).toBeLessThanOrEqual(numbers.prompt - matched + blockSize);
      log.push(`${name}${stream ? ', streamed' : ''}: answer equal; ${JSON.stringify(numbers)}`);
      model.put(messages, [...promptIds, ...replyIds], conversation);
      puts += 1;
      const stored = async () => metric(await metricsOf(baton.adminUrl), 'baton_decode_handles_total{fate="stored"}');
      await expect.poll(stored, { timeout: 20_000, interval: 20 }).toBe(puts);
      return text;
    }

    test('a reply that is generated again, and again', async () => {
      const messages = [said('system', topic(1)), said('user', topic(2))];
      await turn('first', messages);
      await turn('regenerated', messages);
      const text = await turn('regenerated again', messages);
      await turn('gone on with', [...messages, said('assistant', text), said('user', 'And then?')]);
    });

    test('two branches from one reply, side by side', async () => {
      const messages = [said('system', topic(3)), said('user', topic(4))];
      const trunk = [...messages, said('assistant', await turn('trunk', messages))];
      const branches = ['this way', 'that way'].map((way) => [...trunk, said('user', way)]);
      for (const branch of branches) {
        const text = await turn(`branch, ${branch.at(-1)?.content}`, branch);
        branch.push(said('assistant', text), said('user', 'And further?'));
      }
      for (const branch of branches) await turn('branch gone on with', branch);
    });

    test('calls of two tools at once', async () => {
      const call = (id: string) => ({ id, type: 'function', function: { name: 'look', arguments: `{"at": "${id}"}` } });
      const messages: Message[] = [said('system', topic(5)), said('user', topic(6))];
      await turn('before the calls', messages);
      const calls: Message = { role: 'assistant', content: null, tool_calls: [call('a'), call('b')] };
      const results = ['a', 'b'].map((id): Message => ({ role: 'tool', content: topic(7), tool_call_id: id }));
      const asked = [...messages, calls, ...results];
      const text = await turn('results of two tools', asked);
      await turn('after the tools', [...asked, said('assistant', text), said('user', 'Thanks. And?')]);
    });

    test('each message of a named conversation is edited in turn', async () => {
      const conversation = `edits-${stream}`;
      const messages: Message[] = [said('system', topic(8)), said('user', topic(9))];
      for (let i = 0; i < 2; i++) {
        const text = await turn(`edits, turn ${i + 1}`, messages, conversation);
        messages.push(said('assistant', text), said('user', words(15, 20 + i)));
      }
      for (let k = messages.length - 1; k >= 1; k--) {
        const edited = messages.map((message, i) => (i === k ? { ...message, content: words(16, 50 + k) } : message));
        await turn(`message ${k} edited`, edited, conversation);
      }
      await turn('back to two messages', messages.slice(0, 2), conversation);
    });
  });
});
