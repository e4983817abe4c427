import { readFileSync } from 'node:fs';
import { expect } from 'vitest';
import { parseKeySet } from '../../src/auth/key-cache.ts';
import { describeKeys } from '../../src/config/describe-keys.ts';
import { FLAGS } from '../../src/config/flags.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import { readPoolFile } from '../../src/config/pool-file.ts';
import { parseApiKeys, parseRpcTokens } from '../../src/core/tenant.ts';
import { KNOWN } from '../../src/known.ts';
import { drawJson, mutate } from './fuzz-bytes.ts';
import { runFuzz } from './fuzz-run.ts';
import type { Draw } from './property-requests.ts';

const FULL = readFileSync(new URL('../fixtures/config/full.yaml', import.meta.url));
const PATHS = describeKeys().map(({ path }) => path.replaceAll('[]', '.0').split('.'));
const KEYS = Buffer.from(`team-a sha256:${'0'.repeat(64)} # x\n\uFEFFteam-b sha256:${'1'.repeat(64)} operator\n`);
const ALIASES = Buffer.from(
  `a: &a [x, x]\n${Array.from({ length: 30 }, (_, i) => `b${i}: &b${i} [*${i === 0 ? 'a' : `b${i - 1}`}, *${i === 0 ? 'a' : `b${i - 1}`}]\n`).join('')}`,
);

function drawFile(draw: Draw): Buffer {
  if (draw.chance(0.05)) return ALIASES;
  if (draw.chance(0.5)) return mutate(draw, FULL);
  const path = PATHS[draw.int(0, PATHS.length - 1)] ?? [];
  // A key with any value.
  return Buffer.from(
    path.toReversed().reduce((inner, key) => `{${key === '0' ? '' : `${key}: `}${inner}}`, drawJson(draw)),
  );
}

function drawFlags(draw: Draw): Record<string, string | readonly string[]> {
  const drawn: Record<string, string | readonly string[]> = {};
  for (const { name, kind } of FLAGS) {
    if (!draw.chance(0.03)) continue;
    const value = () =>
      mutate(draw, Buffer.from(draw.pick(['http://127.0.0.1:1', '10s', '1', 'a', '10.0.0.0/8']))).toString();
    drawn[name] = kind.startsWith('list') ? [value(), value()] : value();
  }
  return drawn;
}

/** Gives changed files and flags to whatever reads settings: each is taken, or refused with words for people. */
export async function fuzzConfig(seconds: number, seed: number): Promise<number> {
  let taken = 0;
  let refused = 0;
  const loadedEmpty = loadConfig({ flags: {}, env: {}, fileText: '', known: KNOWN, terminal: false });
  if (loadedEmpty.kind === 'error') throw new Error('no settings are a mistake');
  const defaults = loadedEmpty.config.instanceDefaults;
  const sent = await runFuzz(seconds, seed, {
    async once(draw) {
      // Lets timers run: nothing here waits for anything.
      await new Promise((resolve) => setImmediate(resolve));
      const fileText = drawFile(draw).toString();
      const flags = draw.chance(0.3) ? drawFlags(draw) : {};
      const text = JSON.stringify({ fileText, flags });
      try {
        const loaded = loadConfig({ flags, env: {}, fileText, known: KNOWN, terminal: false });
        if (loaded.kind === 'ok') taken += 1;
        else refused += 1;
        if (loaded.kind === 'error' && !loaded.problems.some(({ message }) => message.length > 5))
          return `no words: ${text}`;
        const keys = mutate(draw, KEYS).toString();
        parseApiKeys(keys, 'keys.txt');
        parseRpcTokens(keys, 'tokens.txt');
        readPoolFile(mutate(draw, FULL).toString(), 'pool.yaml', { defaults, connectors: KNOWN.connectors });
      } catch (error) {
        return `${error instanceof Error ? error.stack : String(error)}\n<- ${text}`;
      }
      return refusedKeySet(draw.chance(0.5) ? drawJson(draw) : mutate(draw, KEY_SET).toString());
    },
    check: async () => undefined,
  });
  expect(taken).toBeGreaterThan(10);
  expect(refused).toBeGreaterThan(10);
  return sent;
}

const KEY_SET = Buffer.from('{"keys":[{"kty":"EC","crv":"P-256","kid":"k","x":"AA","y":"AA"}]}');

/** A key set may be refused, by an error with words. */
function refusedKeySet(text: string): string | undefined {
  try {
    parseKeySet(text);
    return undefined;
  } catch (error) {
    return error instanceof Error && !(error instanceof TypeError) ? undefined : `${String(error)}\n<- ${text}`;
  }
}
