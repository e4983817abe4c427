import { describeKeys } from '../config/describe-keys.ts';
import { FLAGS } from '../config/flags.ts';

/**
 * What to write instead of a flag that does not exist and is named like a key of the file: `--store-valkey-url` or
 * `--valkey-url` for `store.valkey.url`. Undefined where no key has that name.
 */
export function fileKeyHint(flag: string): string | undefined {
  const wanted = flag.replace(/^--/, '').replaceAll('_', '-');
  const key = describeKeys().find(({ path }) => namesOf(path).includes(wanted))?.path;
  if (key === undefined) return undefined;
  const own = FLAGS.find(({ paths = [] }) => paths.some((path) => path.join('.') === key));
  return own === undefined ? `set ${key} in the file (--config)` : `did you mean --${own.name}?`;
}

/** A key's path as a flag, and as one without its first section; a single word would mean too many. */
function namesOf(path: string): readonly string[] {
  const words = path.replaceAll('_', '-').split('.');
  const short = words.slice(1);
  return [words, ...(short.length > 1 ? [short] : [])].map((parts) => parts.join('-'));
}
