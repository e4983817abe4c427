import { create, type DescMethod, type DescService, type Message, type MessageInitShape } from '@bufbuild/protobuf';
import type { CallOptions, Client, ContextValues, HandlerContext, ServiceImpl } from '@connectrpc/connect';
import { createContextValues } from '@connectrpc/connect';
import { type BoundMethod, bindService, type FaultSink, untilAborted } from './bind.ts';
import { abortErrorOf, deadlineError } from './errors.ts';
import { RPC_MAX_TIMEOUT_MS } from './limits.ts';

/**
 * Binds the client type of a service to an implementation in this process, without serialisation. It behaves as a
 * remote client does: abort, `timeoutMs` (0 is none), error mapping, UNIMPLEMENTED. Messages are shared and not copied, so both
 * sides treat them as read-only. A server stream starts with its first read.
 */
export function createDirectClient<Desc extends DescService>(
  service: Desc,
  impl: Partial<ServiceImpl<Desc>>,
  onFault: FaultSink = () => undefined,
): Client<Desc> {
  const methods: Record<string, unknown> = {};
  for (const bound of bindService(service, impl, onFault)) {
    methods[bound.method.localName] =
      bound.kind === 'unary'
        ? (input: MessageInitShape<typeof bound.method.input>, options?: CallOptions) =>
            callUnary(bound, input, options)
        : (input: MessageInitShape<typeof bound.method.input>, options?: CallOptions) =>
            callStream(bound, input, options);
  }
  assertClient(service, methods);
  return methods;
}

type Input = MessageInitShape<BoundMethod['method']['input']>;
type Unary = Extract<BoundMethod, { kind: 'unary' }>;
type Streaming = Extract<BoundMethod, { kind: 'server_streaming' }>;

async function callUnary(bound: Unary, input: Input, options: CallOptions | undefined): Promise<Message> {
  const context = openCall(bound.method, options);
  try {
    const request = create(bound.method.input, input);
    const answer = Promise.resolve(bound.call(request, context));
    const output = await (context.canEndEarly ? orEarlyEnd(answer, context) : answer);
    context.reportHeaders();
    return create(bound.method.output, output);
  } finally {
    context.end();
  }
}

async function* callStream(bound: Streaming, input: Input, options: CallOptions | undefined): AsyncGenerator<Message> {
  const context = openCall(bound.method, options);
  try {
    const request = create(bound.method.input, input);
    for await (const message of untilAborted(bound.call(request, context), context.signal)) {
      yield create(bound.method.output, message);
    }
    context.reportHeaders();
  } finally {
    context.end();
  }
}

function openCall(method: DescMethod, options: CallOptions | undefined): DirectContext {
  if (options?.signal?.aborted === true) throw abortErrorOf(options.signal);
  return new DirectContext(method, options);
}

/** Settles as `answer` does, or earlier with the reason why the call ended. */
function orEarlyEnd<T>(answer: Promise<T>, context: DirectContext): Promise<T> {
  return new Promise((resolve, reject) => {
    context.onEarlyEnd = reject;
    answer.then(resolve, reject);
  });
}

/** Context of one call. What calls rarely look at is made when it is first looked at, because a call is cheap. */
class DirectContext implements HandlerContext {
  readonly method: DescMethod;
  readonly protocolName = 'direct';
  readonly requestMethod = 'POST';
  onEarlyEnd: ((reason: Error) => void) | undefined;
  readonly #options: CallOptions | undefined;
  readonly #deadline: number | undefined;
  readonly #timer: NodeJS.Timeout | undefined;
  #controller: AbortController | undefined;
  #ended = false;
  #endReason: unknown;
  #requestHeader: Headers | undefined;
  #responseHeader: Headers | undefined;
  #responseTrailer: Headers | undefined;
  #values: ContextValues | undefined;

  constructor(method: DescMethod, options: CallOptions | undefined) {
    this.method = method;
    this.#options = options;
    options?.signal?.addEventListener('abort', this.#onAbort);
    const timeoutMs = options?.timeoutMs;
    if (timeoutMs !== undefined && timeoutMs > 0 && timeoutMs <= RPC_MAX_TIMEOUT_MS) {
      this.#deadline = performance.now() + timeoutMs;
      this.#timer = setTimeout(() => this.#endEarly(deadlineError()), timeoutMs);
    }
  }

  get service(): DescService {
    return this.method.parent;
  }

  get url(): string {
    return `direct:/${this.method.parent.typeName}/${this.method.name}`;
  }

  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.#ended) this.#controller.abort(this.#endReason);
    }
    return this.#controller.signal;
  }

  get requestHeader(): Headers {
    this.#requestHeader ??= new Headers(this.#options?.headers);
    return this.#requestHeader;
  }

  get responseHeader(): Headers {
    this.#responseHeader ??= new Headers();
    return this.#responseHeader;
  }

  get responseTrailer(): Headers {
    this.#responseTrailer ??= new Headers();
    return this.#responseTrailer;
  }

  get values(): ContextValues {
    this.#values ??= createContextValues();
    return this.#values;
  }

  get canEndEarly(): boolean {
    return this.#options?.signal !== undefined || this.#timer !== undefined;
  }

  readonly timeoutMs = (): number | undefined =>
    this.#deadline === undefined ? undefined : this.#deadline - performance.now();

  reportHeaders(): void {
    this.#options?.onHeader?.(this.responseHeader);
    this.#options?.onTrailer?.(this.responseTrailer);
  }

  /** Ends the call for whatever still runs in its name, as a remote call does when it completes. */
  end(reason?: Error): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#endReason = reason;
    clearTimeout(this.#timer);
    this.#options?.signal?.removeEventListener('abort', this.#onAbort);
    this.#controller?.abort(reason);
  }

  readonly #onAbort = (): void => {
    if (this.#options?.signal !== undefined) this.#endEarly(abortErrorOf(this.#options.signal));
  };

  #endEarly(reason: Error): void {
    this.end(reason);
    this.onEarlyEnd?.(reason);
  }
}

function assertClient<Desc extends DescService>(
  service: Desc,
  methods: Record<string, unknown>,
): asserts methods is Client<Desc> & Record<string, unknown> {
  for (const method of service.methods) {
    if (typeof methods[method.localName] !== 'function') throw new TypeError(`${method.localName} is not bound`);
  }
}
