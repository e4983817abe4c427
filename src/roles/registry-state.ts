import { readFile, rename } from 'node:fs/promises';
import * as z from 'zod';
import { errorFields, type Logger } from '../obs/log.ts';
import type { PoolRegistryService } from '../services/registry/pool-registry.ts';
import type { RegistryState } from '../services/registry/registry-state.ts';
import { isOwnFile, lockFile, replaceFile } from '../stores/own-file.ts';
import { StartError } from './listen.ts';

/** What the files of every version begin with. */
const FAMILY = 'baton-registry-';
const MAGIC = `${FAMILY}1\n`;
/** Between a change and the file that has it, milliseconds. */
const WRITE_AFTER_MS = 500;

const spec = z.object({
  id: z.string(),
  url: z.string(),
  role: z.enum(['prefill', 'decode', 'both']),
  connector: z.string(),
  labels: z.record(z.string(), z.string()),
  kvLeaseMs: z.number(),
  decoderTtlMs: z.number(),
  bidirectional: z.string(),
  loadFailurePolicy: z.string(),
  weight: z.number().exactOptional(),
  dataParallelSize: z.number().exactOptional(),
});

const content = z.object({
  registered: z.array(
    z.object({ spec, leaseMs: z.number().exactOptional(), generation: z.number(), engineId: z.string() }),
  ),
  views: z.record(z.string(), z.array(spec)),
  drains: z.record(z.string(), z.string()),
  dismissed: z.record(z.string(), z.array(z.string())),
  generations: z.record(z.string(), z.number()),
});

/**
 * Gives a registry what the file of an earlier process has, and keeps the file up to date from then on; the stack ends that
 * with a last write. `keptViews` are the sources whose last view is kept, because what they ask may be away at the next start.
 *
 * @throws StartError where the file is somebody else's, or in use
 */
export async function keepRegistryState(
  registry: PoolRegistryService,
  file: string,
  keptViews: () => readonly string[],
  log: Logger,
  stack: AsyncDisposableStack,
): Promise<void> {
  let written = '';
  try {
    stack.use(await lockFile(file, 'registry'));
    if (await isOwnFile(file, FAMILY, 'registry')) written = await readState(registry, file, keptViews, log);
  } catch (error) {
    throw new StartError(`${error instanceof Error ? error.message : String(error)} (--registry-state)`, {
      cause: error,
    });
  }
  let timer: NodeJS.Timeout | undefined;
  let writing: Promise<void> = Promise.resolve();
  const write = async () => {
    const text = `${MAGIC}${JSON.stringify(registry.state(keptViews()))}\n`;
    if (text === written) return;
    await replaceFile(file, (handle) => handle.writeFile(text));
    written = text;
  };
  const writeNext = () => {
    timer = undefined;
    writing = writing.then(write).catch((error: unknown) => {
      log.error({ file, ...errorFields(error) }, 'the state of the registry cannot be written');
    });
  };
  const unsubscribe = registry.onChange(() => {
    timer ??= setTimeout(writeNext, WRITE_AFTER_MS);
  });
  stack.defer(async () => {
    unsubscribe();
    clearTimeout(timer);
    writeNext();
    await writing;
  });
}

/** @returns the text of the file, if it could be used */
async function readState(
  registry: PoolRegistryService,
  file: string,
  keptViews: () => readonly string[],
  log: Logger,
): Promise<string> {
  const text = await readFile(file, 'utf8').catch((error: unknown) => {
    if (error instanceof Error && 'code' in error && error.code === 'ENOENT') return '';
    throw error;
  });
  if (text === '') return '';
  const state = parseState(text);
  if (state === undefined) {
    await rename(file, `${file}.damaged`);
    log.error(
      { file: `${file}.damaged` },
      'the state of the registry is damaged or of another version; it begins anew',
    );
    return '';
  }
  const views = Object.entries(state.views).filter(([source]) => keptViews().includes(source));
  registry.restore({ ...state, views: Object.fromEntries(views) });
  log.info({ file, registered: state.registered.length }, 'the registry goes on from its state file');
  return text;
}

function parseState(text: string): RegistryState | undefined {
  if (!text.startsWith(MAGIC)) return undefined;
  try {
    return content.parse(JSON.parse(text.slice(MAGIC.length)));
  } catch {
    return undefined;
  }
}
