/** Settings of {@link formatPretty}. */
export interface PrettyOptions {
  /** Whether the level is coloured with ANSI sequences. */
  readonly color: boolean;
}

const COLORS: Readonly<Record<string, number>> = { trace: 90, debug: 36, info: 32, warn: 33, error: 31, fatal: 35 };

/**
 * Turns one JSON log line into `HH:MM:SS.mmm LEVEL message key=value …`, with a stack on lines of its own.
 * Values with anything but plain characters are quoted, so that no field can forge a line; other text comes back as is.
 */
export function formatPretty(line: string, options: PrettyOptions): string {
  let record: unknown;
  try {
    record = JSON.parse(line);
  } catch {
    return line;
  }
  if (typeof record !== 'object' || record === null) return line;
  const { level, time, msg, error_stack: stack, ...fields } = record as Record<string, unknown>;
  const word = String(level);
  const label = word.toUpperCase().padEnd(5);
  const color = options.color ? COLORS[word] : undefined;
  const head = [
    typeof time === 'string' ? time.slice(11, 23) : '-',
    color === undefined ? label : `\u001b[${color}m${label}\u001b[39m`,
    ...(typeof msg === 'string' && msg !== '' ? [escapeControls(msg)] : []),
  ];
  const pairs = Object.entries(fields).map(([key, value]) => `${key}=${formatValue(value)}`);
  const frames = typeof stack === 'string' ? stack.split('\n').slice(1) : [];
  return `${[...head, ...pairs].join(' ')}\n${frames.map((frame) => `  ${escapeControls(frame.trim())}\n`).join('')}`;
}

function formatValue(value: unknown): string {
  if (typeof value !== 'string') return escapeControls(JSON.stringify(value) ?? 'undefined');
  return /^[\w.:/@%+,-]+$/.test(value) ? value : escapeControls(JSON.stringify(value));
}

function escapeControls(text: string): string {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what must not reach a terminal
  return text.replace(/[\u0000-\u001f\u007f-\u009f]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);
}
