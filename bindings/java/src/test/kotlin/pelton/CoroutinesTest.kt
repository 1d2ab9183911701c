package pelton

import java.nio.file.Path
import java.time.Duration
import java.util.concurrent.CompletableFuture
import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit
import kotlin.reflect.KType
import kotlin.reflect.typeOf
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.CoroutineStart
import kotlinx.coroutines.async
import kotlinx.coroutines.awaitAll
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.map
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.future.await
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import org.jspecify.annotations.NullMarked
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.Timeout
import org.junit.jupiter.api.io.TempDir

/** The binding in Kotlin: coroutines by the functions of Coroutines.kt, and nullness. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class CoroutinesTest {
    @TempDir lateinit var directory: Path

    private fun <T> withService(handler: Service.Handler, use: suspend CoroutineScope.(Client) -> T): T {
        val name = "unix:" + directory.resolve("socket")
        return Service.listen(name).use { service ->
            val running = Thread.ofVirtual().start { service.run(handler) }
            try {
                Client.connect(name).use { client -> runBlocking { use(client) } }
            } finally {
                service.stop()
                running.join()
            }
        }
    }

    @Test
    fun `coroutines call a service at the same time`() {
        val all = CountDownLatch(100)
        // No handler returns before all have begun.
        val echo = Service.Handler { request ->
            all.countDown()
            all.await()
            request.bytes()
        }
        val replies = withService(echo) { client ->
            (1..100).map { number -> async { client.callSuspending("$number".toByteArray()) } }.awaitAll()
        }
        assertEquals((1..100).map { "$it" }, replies.map { String(it) })
    }

    @Test
    fun `cancelling a coroutine interrupts the handler of its call`() {
        val begun = CompletableFuture<Unit>()
        val interrupted = CountDownLatch(1)
        val holds = Service.Handler {
            begun.complete(Unit)
            try {
                Thread.sleep(Long.MAX_VALUE)
            } catch (end: InterruptedException) {
                interrupted.countDown()
            }
            null
        }
        withService(holds) { client ->
            val call = launch { client.callSuspending("hold".toByteArray()) }
            begun.await()
            call.cancelAndJoin()
            assertTrue(interrupted.await(60, TimeUnit.SECONDS))
        }
    }

    @Test
    fun `a slow collector of a flow slows the sender`() = runBlocking {
        val channel = ThreadChannel.create(Options.DEFAULTS.withCapacity(64 shl 10))
        val sending = launch {
            channel.sender.use { sender -> repeat(1000) { sender.sendSuspending("%-1000d".format(it).toByteArray()) } }
        }
        assertEquals((0..999).toList(), channel.receiver.asFlow().map { String(it).trim().toInt() }.toList())
        sending.join()
    }

    @Test
    fun `what a flow does not collect stays in the channel`() = runBlocking {
        val name = "path:" + directory.resolve("channel")
        Sender.connect(name, Options.DEFAULTS.withCreate(true)).use { sender ->
            for (number in 1..100) sender.send("$number".toByteArray())
        }
        suspend fun numbers(flow: Flow<ByteArray>) = flow.map { String(it).toInt() }.toList()
        assertEquals((1..10).toList(), numbers(Receiver.connect(name).asFlow().take(10)))
        val rest = numbers(Receiver.connect(name, Options.DEFAULTS.withTimeout(Duration.ofSeconds(60))).asFlow())
        // The flow had requested one more.
        assertTrue(rest.first() in 11..12, "${rest.first()}")
        assertEquals((rest.first()..100).toList(), rest)
    }

    @Test
    fun `cancelling a coroutine ends its wait for space`() = runBlocking {
        ThreadChannel.create(Options.DEFAULTS.withCapacity(64 shl 10)).use { channel ->
            var sent = 0
            while (channel.sender.trySend(ByteArray(1000))) sent++
            val waiting = launch(start = CoroutineStart.UNDISPATCHED) { channel.sender.sendSuspending(ByteArray(1)) }
            waiting.cancelAndJoin()
            repeat(sent) { assertEquals(1000, channel.receiver.receive().size) }
            assertNull(channel.receiver.tryReceive())
        }
    }

    /** The type that the compiler gives to an expression: a type of Java without annotations is not nullable. */
    private inline fun <reified T> typeOfResult(@Suppress("UNUSED_PARAMETER") of: () -> T): KType = typeOf<T>()

    @Test
    fun `kotlin knows which results can be null`() {
        assertTrue(Sender::class.java.getPackage().isAnnotationPresent(NullMarked::class.java))
        ThreadChannel.create().use { channel ->
            assertEquals(typeOf<ByteArray?>(), typeOfResult { channel.receiver.tryReceive() })
            assertEquals(typeOf<ByteArray>(), typeOfResult { channel.receiver.receive() })
            assertEquals(typeOf<Info.Peer?>(), typeOfResult { channel.sender.info().peer })
            assertEquals(typeOf<String?>(), typeOfResult { channel.receiver.traceparent() })
        }
    }
}
