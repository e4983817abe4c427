/** Named in the type declarations of @connectrpc/connect and absent from @types/node. */
type HeadersInit = ConstructorParameters<typeof Headers>[0];
/** Named in the type declarations of @msgpack/msgpack and absent from @types/node. */
type BufferSource = ArrayBufferView | ArrayBuffer;
