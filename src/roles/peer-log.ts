import { ConnectError } from '@connectrpc/connect';
import type { Logger } from '../obs/log.ts';
import { whyNoConnection } from '../rpc/connection-words.ts';
import { isRefusal } from '../rpc/errors.ts';

/** What another process of baton is to this one. */
export type PeerRole = 'router' | 'registry' | 'store';

interface Words {
  /** What it needs to serve this process. */
  readonly needs: string;
  /** What happens until it does. */
  readonly meanwhile: string;
  /** Some of its calls may be refused and others not, so it is well only this long after the last that was, milliseconds. */
  readonly holdMs: number;
}

const TOKEN = 'the token that --rpc-client-token-file holds';

const WORDS: Readonly<Record<PeerRole, Words>> = {
  router: {
    needs: `--router-url has to name the RPC port of a router, and ${TOKEN} has to act for any tenant there`,
    meanwhile: 'clients get 503',
    holdMs: 0,
  },
  registry: {
    needs: `--registry-url has to name the RPC port of a registry or of a router, and ${TOKEN} has to be known there`,
    meanwhile: 'the view of the engines stays as it was',
    holdMs: 0,
  },
  store: {
    needs: `--kvstore-url has to name the RPC port of a store, and ${TOKEN} has to act for any tenant there, as operator`,
    meanwhile: 'requests run without reuse',
    holdMs: 60_000,
  },
};

/** Says once in the log when another process begins to be away or to refuse this one, and once when it is well again. */
export class PeerLog {
  readonly #log: Logger;
  readonly #role: PeerRole;
  readonly #now: () => number;
  /** What the log says of it: nothing, that it is away, or the cause of a refusal. */
  #told: string | undefined;
  #refusedAt = Number.NEGATIVE_INFINITY;

  /** @param now monotonic, milliseconds; default the clock of the process */
  constructor(log: Logger, role: PeerRole, now: () => number = () => performance.now()) {
    this.#log = log;
    this.#role = role;
    this.#now = now;
  }

  /** How a call to it ended: undefined if it was answered. */
  readonly note = (error: unknown): void => {
    if (error === undefined) this.#well();
    else if (isRefusal(error)) this.#refused(ConnectError.from(error).rawMessage);
    else this.#away(error);
  };

  #well(): void {
    if (this.#told === undefined || this.#now() - this.#refusedAt < WORDS[this.#role].holdMs) return;
    this.#told = undefined;
    this.#log.info(`the ${this.#role} answers again`);
  }

  #refused(cause: string): void {
    this.#refusedAt = this.#now();
    if (this.#told === cause) return;
    this.#told = cause;
    const { needs, meanwhile } = WORDS[this.#role];
    this.#log.error({ cause }, `the ${this.#role} refuses this process: ${needs}; ${meanwhile} until then`);
  }

  #away(error: unknown): void {
    if (this.#told !== undefined) return;
    this.#told = AWAY;
    const cause = whyNoConnection(error) ?? ConnectError.from(error).rawMessage;
    this.#log.warn({ cause }, `the ${this.#role} does not answer; ${WORDS[this.#role].meanwhile} until it does`);
  }
}

const AWAY = 'away';
