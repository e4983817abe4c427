import { readPoolFile } from '../config/pool-file.ts';
import { formatProblem } from '../config/problem.ts';
import type { InstanceSource, MakeSource, SourceParts, SourceSink } from './source.ts';
import { watchText } from './watch-text.ts';

/** The file of `discovery.file`. */
export const fileSource: MakeSource = (parts) => {
  const { file } = parts.config.discovery;
  return file === undefined ? undefined : followFile(file, parts);
};

/** Follows a file of instances, however it is replaced; looks at it every half second unless told otherwise. */
export function followFile(
  file: string,
  { config, connectors }: Pick<SourceParts, 'config' | 'connectors'>,
  lookMs?: number,
): InstanceSource {
  let complaint = '';
  let named = 0;
  const complain = (sink: SourceSink, lines: readonly string[], message: string) => {
    // Once while it is the same.
    if (lines.join('\n') === complaint) return;
    complaint = lines.join('\n');
    for (const line of lines) sink.warn({ file, problem: line }, message);
  };
  const take = (sink: SourceSink, text: string) => {
    const read = readPoolFile(text, file, { defaults: config.instanceDefaults, connectors });
    const lines = read.problems.map(formatProblem);
    if (read.kind === 'error') {
      complain(sink, lines, 'the pool file cannot be used; its last view stays');
      return;
    }
    complaint = '';
    complain(sink, lines, 'a mistake in the pool file; the rest of it is used');
    const { length } = read.instances;
    if (length === 0 && named > 0) {
      sink.warn({ file, instances: named }, 'the pool file names no instances any more: all that it named drain');
    }
    named = length;
    sink.view(read.instances);
  };
  return {
    name: 'file',
    run: (sink, signal) =>
      watchText(
        file,
        (now) => {
          if (now.kind === 'text') take(sink, now.text);
          else complain(sink, [`it ${now.why}`], 'the pool file cannot be read; its last view stays');
        },
        signal,
        lookMs,
      ),
  };
}
