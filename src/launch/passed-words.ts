import { bad, type ValueParser } from '../config/values.ts';
import { parseTexts } from './value-reader.ts';

/** Flags that launch itself gives, each with what to write instead of passing it on. */
type OwnFlags = Readonly<Record<string, string>>;

// A start with another port or another number of ranks waits until --ready-timeout for an engine that has long loaded.
const ENGINE_OWN: OwnFlags = {
  '--port': '--prefill-port and --decode-port, or port in the topology file',
  '--tensor-parallel-size': '--tensor-parallel-size of baton launch, or tensor_parallel_size in the topology file',
  '-tp': '--tensor-parallel-size of baton launch, or tensor_parallel_size in the topology file',
};

const BATON_OWN: OwnFlags = {
  '--kv-connector': '--connector of baton launch',
  ...Object.fromEntries(
    [
      '--host',
      '--port',
      '--rpc-port',
      '--admin-port',
      '--decoder-init-port',
      '--decoder-alloc-port',
      '--proxy-port',
    ].map((flag) => [flag, `${flag} of baton launch`]),
  ),
};

/** Reads the words that are passed on to engines. */
export const parseEngineWords: ValueParser<readonly string[]> = (raw) => parseWords(raw, ENGINE_OWN);

/** Reads the words that are passed on to `baton serve`. */
export const parseBatonWords: ValueParser<readonly string[]> = (raw) => parseWords(raw, BATON_OWN);

function parseWords(raw: unknown, own: OwnFlags): ReturnType<ValueParser<readonly string[]>> {
  const texts = parseTexts(raw);
  if (texts.kind === 'bad') return texts;
  for (const word of texts.value) {
    if (word.trim() === '') return bad('expected an argument, got an empty text');
    const [, flag = '', rest = ''] = /^(--?[A-Za-z][^\s=]*)(.*)$/s.exec(word) ?? [];
    if (/^\s/.test(rest)) return bad(`"${word}" is two words; write ${flag}=${rest.trim()}`);
    const instead = own[flag.replaceAll('_', '-')];
    if (instead !== undefined) return bad(`${flag} is set by baton launch; use ${instead}`);
  }
  return texts;
}
