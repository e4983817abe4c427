import { readFile } from 'node:fs/promises';
import { readText } from '../config/load.ts';
import { formatProblem, type Problem } from '../config/problem.ts';
import { whyUnread } from '../config/unread.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import { StartError } from './listen.ts';

/** What a {@link watchFiles} makes of its files. */
export interface Watched<T> extends Disposable {
  /** From the files as they are, or as they were when they were last good. */
  readonly current: T;
}

/** What {@link watchFiles} needs; `name` is the key of the file of settings. */
export interface WatchFilesOptions<T> {
  readonly files: readonly { readonly name: string; readonly path: string }[];
  /** Makes the value of the files' texts; throws a StartError for people. */
  readonly make: (texts: readonly string[]) => T;
  /** Takes a new value; one that throws it is left, as if `make` had thrown. */
  readonly use?: (value: T) => void;
  readonly log: Logger;
  /** Between two looks, milliseconds. Default 500. */
  readonly intervalMs?: number;
}

/**
 * Reads files at the start and again whenever they change, however they are replaced. Files that cannot be used at the
 * start are a StartError; later ones are logged, and the old value stays.
 */
export function watchFiles<T>({ files, make, use, log, intervalMs = 500 }: WatchFilesOptions<T>): Watched<T> {
  const names = files.map(({ name }) => name).join(', ');
  let texts: readonly string[] = files.map(({ name, path }) => {
    const text = readText(path);
    if (text.kind === 'bad') throw new StartError(`${name}: ${text.message}`);
    return text.text;
  });
  let current: T;
  try {
    current = make(texts);
  } catch (error) {
    throw new StartError(`${names}: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
  let complained = '';
  const look = async () => {
    try {
      const seen = await Promise.all(files.map(({ path }) => readAgain(path)));
      if (seen.every((text, index) => text === texts[index])) return;
      const value = make(seen);
      use?.(value);
      texts = seen;
      current = value;
      complained = '';
      log.info({ files: names }, 'files were read again');
    } catch (error) {
      // Once for each state of the files, not at every look.
      const message = error instanceof Error ? error.message : String(error);
      if (message === complained) return;
      complained = message;
      // A mistake in a file is the user's; a stack would only hide what is wrong.
      const fields = error instanceof StartError ? { cause: message } : errorFields(error);
      log.error({ files: names, ...fields }, 'changed files cannot be used; the old content stays');
    }
  };
  let looking = false;
  const timer = setInterval(() => {
    if (looking) return;
    looking = true;
    void look().finally(() => {
      looking = false;
    });
  }, intervalMs);
  timer.unref();
  return {
    get current() {
      return current;
    },
    [Symbol.dispose]: () => clearInterval(timer),
  };
}

async function readAgain(path: string): Promise<string> {
  try {
    return await readFile(path, 'utf8');
  } catch (error) {
    throw new StartError(`${path} ${whyUnread(error)}`, { cause: error });
  }
}

/** Watches a file of keys; `name` is the key of the file of settings that names it. */
export function watchKeys<T>(
  name: string,
  path: string,
  parse: (
    text: string,
    file: string,
  ) => { readonly kind: 'ok'; readonly keys: T } | { readonly kind: 'error'; readonly problems: readonly Problem[] },
  log: Logger,
): Watched<T> {
  return watchFiles({
    files: [{ name, path }],
    make: ([text = '']) => {
      const parsed = parse(text, path);
      if (parsed.kind === 'ok') return parsed.keys;
      throw new StartError(parsed.problems.map(formatProblem).join('\n'));
    },
    log,
  });
}
