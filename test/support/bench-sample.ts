import type { Sample } from '../../src/bench/send.ts';

/** What was seen of a request that went well, with what a test wants of its own. */
export function benchSample(own: Partial<Sample>): Sample {
  return {
    startMs: 0,
    firstTokenMs: 100,
    gapsMs: [],
    totalMs: 100,
    inputTokens: 0,
    outputTokens: 1,
    cachedTokens: undefined,
    text: '',
    plan: undefined,
    error: undefined,
    ...own,
  };
}
