;;;; The package and its exports.

(defpackage #:pelton
  (:use #:cl #:sb-alien)
  (:import-from #:sb-sys
                #:system-area-pointer #:sap-int #:int-sap #:sap+ #:sap-ref-8 #:sap-ref-32 #:sap-ref-64
                #:signed-sap-ref-64 #:sap-ref-sap #:vector-sap #:with-pinned-objects #:without-interrupts
                #:with-local-interrupts #:allow-with-interrupts #:with-interrupts
                #:*interrupts-enabled* #:*allow-with-interrupts* #:*interrupt-pending*)
  (:documentation "Messages at memory speed between the threads, processes and languages of one machine.

Channels: MAKE-CHANNEL, OPEN-SENDER, OPEN-RECEIVER, SEND, RECEIVE. Publish and subscribe: OPEN-PUBLISHER,
OPEN-SUBSCRIBER, PUBLISH, RECEIVE-DELIVERY. Appending: OPEN-APPENDERS, APPEND-MESSAGE, FLUSH.
Calls: OPEN-SERVICE, SERVE, OPEN-CLIENT, CALL. Files: OPEN-ENGINE, READ-FILE, WRITE-FILE.

Messages are vectors of bytes: OCTETS. Sizes are in bytes. Every :TIMEOUT is in seconds, a real number; NIL waits
without limit, but a function that opens by connecting then fails immediately if no peer is there. A handle belongs
to one thread at a time, unless its docstring says otherwise. An error is a PELTON-ERROR.")
  (:export
   ;; Bytes.
   #:octets #:make-octets #:sap-octets
   ;; Conditions, their readers, and restarts.
   #:pelton-error #:pelton-error-code #:pelton-error-detail #:pelton-error-subscriber
   #:channel-ended #:closed-error #:peer-died-error
   #:timed-out #:too-large-error #:too-small-error #:too-many-descriptors-error #:descriptors-lost-error
   #:corrupt-error #:refused-error #:hung-up-error #:no-listener-error #:in-use-error #:name-error #:option-error
   #:no-channel-error #:not-a-channel-error #:role-taken-error #:no-space-error #:rebooted-error
   #:system-error #:system-error-errno #:forked-error #:internal-error
   #:sink-error #:sink-error-cause #:not-a-record-file-error #:later-version-error #:damaged-error
   #:torn-error
   #:usage-error #:null-error #:closed-handle-error #:wrong-thread-error #:not-reserved-error #:reserved-error
   #:not-received-error #:not-released-error
   #:call-failed #:call-failed-code #:call-failed-octets #:call-abandoned
   #:leaked-handle #:leaked-handle-type
   #:wait-longer #:drop-message #:resume-channel #:retry #:skip-damage
   ;; Every handle.
   #:handle #:handle-open-p #:close-handle #:resume #:sync #:descriptor #:info
   ;; Channels.
   #:sender #:receiver #:senders #:make-channel #:open-sender #:open-receiver #:open-gathering-receiver #:open-senders
   #:with-channel #:with-sender #:with-receiver #:with-gathering-receiver #:with-senders
   #:send #:try-send #:send-sap #:send-batch #:send-descriptors #:with-reserved #:wait-released #:trim
   #:receive #:try-receive #:receive-into #:receive-batch #:receive-event #:with-received #:do-received #:do-messages
   #:take-descriptors #:held #:receive-held #:held-sap #:held-size
   ;; Publish and subscribe.
   #:publisher #:open-publisher #:with-publisher #:publish #:try-publish #:wait-subscribers #:admit #:subscribers
   #:subscriber #:open-subscriber #:with-subscriber #:receive-delivery #:try-receive-delivery #:with-delivery
   #:do-deliveries #:remove-subscription
   #:subscriber-set #:open-subscriber-set #:with-subscriber-set #:add-subscriber #:remove-subscriber
   #:receive-from-set #:try-receive-from-set #:do-set-deliveries
   ;; Appending and flushing.
   #:appenders #:open-appenders #:with-appenders #:append-message #:append-sap
   #:flush #:open-flush #:with-flush #:run-flush
   #:record-file #:chunks #:do-chunks #:do-records #:map-record-file
   ;; Calls.
   #:client #:open-client #:with-client #:call #:with-call #:submit #:await #:cancel #:notify
   #:service #:open-service #:with-service #:serve #:stop #:drain
   #:request #:request-octets #:request-pid #:request-uid #:request-traceparent
   #:request-cancelled-p #:reply #:reply-part #:end-reply #:fail
   ;; Files.
   #:engine #:open-engine #:with-engine #:file #:open-file #:with-file #:read-file #:write-file #:sync-file
   #:truncate-file #:allocate-file #:file-status #:list-directory #:make-directory #:remove-directory #:unlink-file
   #:rename-path #:link-file #:read-file-octets #:write-file-octets))
