import { Agent } from 'undici';
import { arrivalsOf } from './arrivals.ts';
import { seededChance } from './chance.ts';
import { makePrompts, type Prompt } from './dataset.ts';
import { type Endpoint, findModel } from './endpoint.ts';
import { runLoad } from './load.ts';
import type { ProgressBar } from './progress-bar.ts';
import { type Sample, send } from './send.ts';
import type { ServeSettings } from './serve-settings.ts';
import { fitWords, ONE_EACH, PROBES, probeText, type WordTokens } from './words.ts';

/** What a run has around it. */
export interface ServeRun {
  /** Ends it early: what was answered until then counts. */
  readonly signal: AbortSignal;
  /** Told what goes on, a line each. */
  tell(line: string): void;
  /** A bar for so many requests. */
  bar(total: number): ProgressBar;
}

/** What was seen. */
export interface ServeOutcome {
  readonly model: string;
  /** Of the requests that were answered or failed, in the order of sending. */
  readonly samples: readonly Sample[];
  readonly durationMs: number;
  readonly busy: number;
  readonly lateMs: number;
}

/** Times and draws of warm-ups are not those of what is measured. */
const WARMUP_SEED = 0x5eed;

/** Sends everything and waits for it. Rejects with a sentence where nothing can be measured. */
export async function runServe(settings: ServeSettings, run: ServeRun): Promise<ServeOutcome> {
  const dispatcher = new Agent({ headersTimeout: 0, bodyTimeout: 0 });
  try {
    return await runWith({ baseUrl: settings.baseUrl, headers: settings.headers, dispatcher }, settings, run);
  } finally {
    await dispatcher.destroy();
  }
}

async function runWith(endpoint: Endpoint, settings: ServeSettings, run: ServeRun): Promise<ServeOutcome> {
  const { dataset, prompts, seed, warmups, rate, burstiness, maxConcurrency } = settings;
  const model = await findModel(endpoint, settings.model, run.signal);
  const ask = (prompt: Prompt) => send(callOf(settings, endpoint, model, prompt), run.signal);
  // A file that is not as it should be is told before anything is sent.
  const fromFile = dataset.name === 'random' ? undefined : makePrompts(dataset, prompts, seed, ONE_EACH);
  const words = await tryOut(fromFile === undefined ? PROBES : [PROBES[0]], ask);
  const all = fromFile ?? makePrompts(dataset, prompts, seed, words);
  if (warmups > 0) {
    run.tell(`warming up with ${warmups} requests`);
    const warm = makePrompts(dataset, warmups, seed + WARMUP_SEED, words);
    const arrivalsMs = warm.map(() => 0);
    await runLoad({ arrivalsMs, maxConcurrency, signal: run.signal }, (i) => ask(at(warm, i)));
  }
  run.tell(`sending ${prompts} requests to ${settings.baseUrl}${settings.endpoint}, model ${model}`);
  const arrivalsMs = arrivalsOf(prompts, rate, burstiness, seededChance(seed + 1));
  const bar = run.bar(prompts);
  const load = await runLoad({ arrivalsMs, maxConcurrency, signal: run.signal }, async (i) => {
    const sample = await ask(at(all, i));
    if (run.signal.aborted && sample.error !== undefined) return undefined;
    bar.step(sample.error !== undefined);
    return sample;
  });
  bar.end();
  return { model, samples: load.done, durationMs: load.durationMs, busy: load.busy, lateMs: load.lateMs };
}

function at(prompts: readonly Prompt[], index: number): Prompt {
  const prompt = prompts[index];
  if (prompt === undefined) throw new Error(`no prompt ${index}`);
  return prompt;
}

/** Sends texts of so many words one after the other, and learns how many tokens words have there. */
async function tryOut(counts: readonly number[], ask: (prompt: Prompt) => Promise<Sample>): Promise<WordTokens> {
  const tokens: number[] = [];
  for (const count of counts) {
    const { error, inputTokens } = await ask({ text: probeText(count), outputTokens: 1 });
    if (error !== undefined) throw new Error(`the first request failed: ${error}`);
    if (inputTokens !== undefined) tokens.push(inputTokens);
  }
  const [few, many] = tokens;
  return few === undefined || many === undefined ? ONE_EACH : fitWords([few, many]);
}

function callOf(settings: ServeSettings, { dispatcher }: Endpoint, model: string, { text, outputTokens }: Prompt) {
  const isChat = settings.endpoint.endsWith('/chat/completions');
  return {
    url: `${settings.baseUrl}${settings.endpoint}`,
    headers: settings.headers,
    timeoutMs: settings.timeoutMs,
    dispatcher,
    body: {
      model,
      ...(isChat
        ? { messages: [{ role: 'user', content: text }], max_completion_tokens: outputTokens }
        : { prompt: text, max_tokens: outputTokens }),
      temperature: settings.temperature,
      stream: true,
      stream_options: { include_usage: true },
      // Other endpoints than vLLM's may refuse it.
      ...(settings.ignoreEos ? { ignore_eos: true } : {}),
    },
  };
}
