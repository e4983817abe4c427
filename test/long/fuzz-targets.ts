import { fuzzConfig } from './fuzz-config.ts';
import { fuzzFacade } from './fuzz-facade.ts';
import { fuzzRpc } from './fuzz-rpc.ts';

/** What is fuzzed, and how, for so many seconds from a seed; resolves to how much was sent. */
export const FUZZED: readonly (readonly [what: string, fuzz: (seconds: number, seed: number) => Promise<number>])[] = [
  ['the facade', fuzzFacade],
  ['the RPC port', fuzzRpc],
  ['settings', fuzzConfig],
];
