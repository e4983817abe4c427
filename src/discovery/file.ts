import { readFile } from 'node:fs/promises';
import { readPoolFile } from '../config/pool-file.ts';
import { formatProblem } from '../config/problem.ts';
import { pause } from '../services/pause.ts';
import type { InstanceSource, MakeSource, SourceParts, SourceSink } from './source.ts';

/** Between two looks at the file, milliseconds. */
const LOOK_MS = 500;

/** The file of `discovery.file`. */
export const fileSource: MakeSource = (parts) => {
  const { file } = parts.config.discovery;
  return file === undefined ? undefined : followFile(file, parts);
};

/**
 * Reads a file again and again. Its text is compared and not its times, so that it does not matter how it is replaced: by a
 * write, by a rename, or by the swap of a link above it as Kubernetes does for a ConfigMap.
 */
export function followFile(
  file: string,
  { config, connectors }: Pick<SourceParts, 'config' | 'connectors'>,
  lookMs = LOOK_MS,
): InstanceSource {
  let text: string | undefined;
  let seen: string | undefined;
  let complaint = '';
  const complain = (sink: SourceSink, lines: readonly string[], message: string) => {
    // Once for each state of the file, not at every look.
    if (lines.join('\n') === complaint) return;
    complaint = lines.join('\n');
    for (const line of lines) sink.warn({ file, problem: line }, message);
  };
  const look = async (sink: SourceSink) => {
    let now: string;
    try {
      now = await readFile(file, 'utf8');
    } catch (error) {
      const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
      complain(sink, [code], 'the pool file cannot be read; its last view stays');
      return;
    }
    // A change counts when it is seen twice: the first time it may be half written.
    const isWhole = text === undefined || now === seen;
    seen = now;
    if (now === text || !isWhole) return;
    text = now;
    const read = readPoolFile(now, file, { defaults: config.instanceDefaults, connectors });
    const lines = read.problems.map(formatProblem);
    if (read.kind === 'error') {
      complain(sink, lines, 'the pool file cannot be used; its last view stays');
      return;
    }
    complaint = '';
    complain(sink, lines, 'a mistake in the pool file; the rest of it is used');
    sink.view(read.instances);
  };
  return {
    name: 'file',
    run: async (sink, signal) => {
      while (!signal.aborted) {
        await look(sink);
        await pause(lookMs, signal);
      }
    },
  };
}
