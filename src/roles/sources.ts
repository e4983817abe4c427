import { SOURCES } from '../discovery/index.ts';
import type { SourceParts } from '../discovery/source.ts';
import { errorFields, type LogFields, type Logger } from '../obs/log.ts';
import type { PoolRegistryService } from '../services/registry/pool-registry.ts';

/** How long the start waits for what every source sees first, milliseconds. */
const FIRST_VIEW_MS = 1000;

/** Follows every source of the settings; the stack ends that. Resolves when each has told a view or why it has none. */
export async function startSources(
  registry: PoolRegistryService,
  parts: SourceParts,
  log: Logger,
  stack: AsyncDisposableStack,
): Promise<void> {
  const stop = new AbortController();
  const made = await Promise.all(SOURCES.map((make) => make(parts)));
  const sources = made.filter((source) => source !== undefined);
  const first = sources.map(() => Promise.withResolvers<void>());
  const runs = sources.map((source, index) => {
    const { name } = source;
    const settle = () => first[index]?.resolve();
    const sink = {
      view: (instances: SourceParts['instances']) => {
        registry.applySource(name, instances);
        settle();
      },
      warn: (fields: LogFields, message: string) => {
        log.warn({ source: name, ...fields }, message);
        settle();
      },
    };
    return source.run(sink, stop.signal).catch((error: unknown) => {
      log.error({ source: name, ...errorFields(error) }, 'a source of instances broke; its last view stays');
      settle();
    });
  });
  stack.defer(async () => {
    stop.abort();
    await Promise.all(runs);
  });
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, FIRST_VIEW_MS);
  });
  await Promise.race([Promise.all(first.map(({ promise }) => promise)), late]);
  clearTimeout(timer);
}
