import { rankTokens, type TokenLogprob } from './sampler.ts';
import type { TokenStep } from './sequence.ts';
import { special, tokenBytes } from './tokenizer.ts';

/** The alternatives of one generated or echoed token, the chosen one first. */
export type RankedToken = readonly TokenLogprob[];

/** What one event of a choice carries. */
export interface Delta {
  /** What the model thinks before it answers. */
  readonly thought: string;
  readonly text: string;
  readonly ids: readonly number[];
  readonly ranked: readonly RankedToken[];
}

/** Settings of a choice's text. */
export interface OutputSettings {
  readonly stops: readonly string[];
  readonly keepStop: boolean;
  readonly tokensPerEvent: number;
  /** Alternatives per token; undefined = none. */
  readonly logprobs: number | undefined;
  readonly salt: number;
  /** The reply begins with thinking, which ends at a token of its own. */
  readonly thinks: boolean;
}

/** Turns the tokens of one choice into text deltas and finds stop strings, as the engine's front end does. */
export class OutputCollector {
  text = '';
  readonly ids: number[] = [];
  readonly ranked: RankedToken[] = [];
  matchedStop: string | null = null;
  private readonly settings: OutputSettings;
  private readonly emit: (delta: Delta) => void;
  private readonly decoder = new TextDecoder();
  private readonly holdBack: number;
  private sentText = 0;
  private sentTokens = 0;
  /** Where in the text the thought ends. */
  private thoughtEnd: number;

  constructor(settings: OutputSettings, emit: (delta: Delta) => void) {
    this.settings = settings;
    this.emit = emit;
    this.thoughtEnd = settings.thinks ? Number.POSITIVE_INFINITY : 0;
    this.holdBack = settings.stops.reduce((longest, stop) => Math.max(longest, stop.length - 1), 0);
  }

  /** The text without what the model thought. */
  get content(): string {
    return this.text.slice(this.thoughtEnd);
  }

  /** What the model thought; empty where it did not. */
  get thought(): string {
    return this.text.slice(0, this.thoughtEnd);
  }

  /** Takes one token; false when a stop string ended the text. The last delta waits for `takeRest`. */
  push(step: TokenStep): boolean {
    this.ids.push(step.id);
    if (this.settings.logprobs !== undefined) {
      this.ranked.push(rankTokens(step.state, this.settings.salt, step.id, Math.max(1, this.settings.logprobs)));
    }
    const before = this.text.length;
    if (step.id === special.thinkEnd && this.thoughtEnd === Number.POSITIVE_INFINITY)
      this.thoughtEnd = this.text.length;
    if (step.id !== special.eos) {
      this.text += this.decoder.decode(Uint8Array.from(tokenBytes(step.id)), { stream: true });
    }
    for (const stop of this.settings.stops) {
      const at = this.text.indexOf(stop, Math.max(0, before - stop.length + 1));
      if (at < 0) continue;
      this.matchedStop = stop;
      this.text = this.text.slice(0, this.settings.keepStop ? at + stop.length : at);
      return false;
    }
    if (!step.isLast && this.ids.length - this.sentTokens >= this.settings.tokensPerEvent) {
      this.emit(this.cut(Math.max(this.sentText, this.text.length - this.holdBack)));
    }
    return true;
  }

  /** What no event has carried yet. */
  takeRest(): Delta {
    return this.cut(this.text.length);
  }

  private cut(end: number): Delta {
    const delta = {
      thought: this.text.slice(this.sentText, Math.min(end, this.thoughtEnd)),
      text: this.text.slice(Math.max(this.sentText, this.thoughtEnd), Math.max(end, this.sentText)),
      ids: this.ids.slice(this.sentTokens),
      ranked: this.ranked.slice(this.sentTokens),
    };
    this.sentText = Math.max(this.sentText, end);
    this.sentTokens = this.ids.length;
    return delta;
  }
}
