import type { Engine } from './engine.ts';
import { type HashState, hashText } from './hash.ts';
import type { JsonObject } from './json.ts';
import type { NoticeFault } from './kv-sender.ts';
import type { ServedModel, SimConfig } from './options.ts';
import { type Delta, OutputCollector } from './output.ts';
import type { GenerateRequest } from './parse-request.ts';
import { EngineError, type EngineRequest, type EngineResult } from './sequence.ts';
import { special } from './tokenizer.ts';
import { type PlannedCall, planCall } from './tool-calls.ts';

/** One finished choice. */
export interface Choice {
  readonly index: number;
  readonly promptIndex: number;
  readonly output: OutputCollector;
  readonly call: PlannedCall | undefined;
  readonly rest: Delta;
  readonly finishReason: string;
  readonly stopReason: string | number | null;
  readonly result: EngineResult;
}

/** Callbacks for a streamed reply; all are called in the order of the choice's tokens. */
export interface ChoiceEvents {
  readonly onStart: (index: number, promptIndex: number) => void;
  readonly onDelta: (index: number, delta: Delta, call: PlannedCall | undefined, textSoFar: string) => void;
  readonly onFinish: (choice: Choice) => void;
}

/** What separates the KV of two requests with equal tokens and pictures. */
export function partitionOf(model: ServedModel, models: readonly ServedModel[], request: GenerateRequest): HashState {
  const parent = model.parent === null ? '' : (models.find((other) => other.id === model.parent)?.root ?? model.parent);
  return hashText(JSON.stringify([model.weights, parent, request.cacheSalt]));
}

function finishReason(request: GenerateRequest, result: EngineResult, output: OutputCollector): string {
  if (output.matchedStop !== null) return 'stop';
  const calls = request.tools !== undefined && !request.tools.isNamed && result.finish === 'stop';
  return calls ? 'tool_calls' : result.finish;
}

/** Everything a run needs besides the request. */
export interface GenerateContext {
  readonly engine: Engine;
  readonly config: SimConfig;
  readonly model: ServedModel;
  /** Public id, and the 8 hex digits that make it internal. */
  readonly publicId: string;
  readonly suffix: string;
  readonly slowMs: number;
  readonly noticeFault: NoticeFault | undefined;
  readonly signal: AbortSignal;
}

/** Runs every prompt and choice of a request side by side; the first failure ends the others and is thrown. */
export async function generate(
  request: GenerateRequest,
  context: GenerateContext,
  events: ChoiceEvents | undefined,
): Promise<Choice[]> {
  const { engine, config } = context;
  const partition = partitionOf(context.model, config.models, request);
  const stop = new AbortController();
  const onAbort = (): void => stop.abort();
  context.signal.addEventListener('abort', onAbort);
  if (context.signal.aborted) stop.abort();

  const runChoice = async (promptIndex: number, child: number): Promise<Choice> => {
    const index = promptIndex * request.n + child;
    const salt = request.isGreedy || child === 0 ? request.salt : request.salt + child * 0x632be5ab;
    const indexPart = request.api === 'chat' ? '' : `-${promptIndex}`;
    const childPart = request.n > 1 ? `${child}_` : '';
    let call: PlannedCall | undefined;
    const { tools } = request;
    const output: OutputCollector = new OutputCollector(
      {
        stops: tools === undefined ? request.stops : [],
        keepStop: request.keepStop,
        tokensPerEvent: config.tokensPerEvent,
        logprobs: request.logprobs,
        salt,
        thinks: request.api === 'chat' && config.reasoning && request.prompts[promptIndex]?.at(-1) === special.think,
      },
      (delta) => events?.onDelta(index, delta, call, output.content),
    );
    const engineRequest: EngineRequest = {
      internalId: `${childPart}${context.publicId}${indexPart}-${context.suffix}`,
      prompt: request.prompts[promptIndex] ?? [],
      media: request.media,
      partition,
      maxTokens: request.maxTokens[promptIndex] ?? 1,
      minTokens: request.minTokens,
      ignoreEos: request.ignoreEos,
      stopTokenIds: new Set(request.stopTokenIds),
      sampler: { tokenizer: config.tokenizer, eosEvery: config.eosEvery, salt },
      kv: request.kv,
      skipCache: request.promptLogprobs !== undefined,
      ...(tools === undefined
        ? {}
        : {
            force: (state: HashState) => {
              call = planCall(tools, state, salt, config.tokenizer);
              return call.tokens;
            },
          }),
      slowMs: context.slowMs,
      ...(context.noticeFault === undefined ? {} : { noticeFault: context.noticeFault }),
      signal: stop.signal,
      onStart: () => events?.onStart(index, promptIndex),
      onToken: (step) => output.push(step),
    };
    const result = await engine.run(engineRequest);
    const choice: Choice = {
      index,
      promptIndex,
      output,
      call,
      rest: output.takeRest(),
      finishReason: finishReason(request, result, output),
      stopReason: output.matchedStop ?? result.stopReason,
      result,
    };
    events?.onFinish(choice);
    return choice;
  };

  const jobs: Promise<Choice>[] = [];
  for (let prompt = 0; prompt < request.prompts.length; prompt += 1) {
    for (let child = 0; child < request.n; child += 1) jobs.push(runChoice(prompt, child));
  }
  let failure: unknown;
  const settled = await Promise.all(
    jobs.map((job) =>
      job.catch((error: unknown) => {
        failure ??= error;
        stop.abort();
        return undefined;
      }),
    ),
  );
  context.signal.removeEventListener('abort', onAbort);
  if (failure !== undefined) throw failure;
  const choices = settled.filter((choice) => choice !== undefined);
  if (choices.length !== jobs.length) throw new EngineError('aborted');
  return choices;
}

/** The handle of a whole reply: the last choice's of the first prompt, the others stay pinned unseen. */
export function replyHandle(request: GenerateRequest, choices: readonly Choice[]): JsonObject | null {
  const ofFirstPrompt = choices.filter((choice) => choice.promptIndex === 0);
  return ofFirstPrompt[request.n - 1]?.result.handle ?? null;
}
