;;;; What pelton exports.

(defpackage #:pelton
  (:use #:cl #:sb-alien)
  (:shadow #:rename-file)
  (:import-from #:sb-sys
                #:system-area-pointer #:sap-int #:int-sap #:sap+ #:sap-ref-8 #:sap-ref-32 #:sap-ref-64 #:signed-sap-ref-64
                #:sap-ref-sap #:vector-sap #:with-pinned-objects #:without-interrupts #:with-local-interrupts
                #:allow-with-interrupts #:with-interrupts)
  (:export
   ;; bytes
   #:octets #:make-octets #:sap-octets
   ;; conditions: one for each code of the library, and
   #:timed-out #:closed-error #:peer-died-error #:too-large-error #:too-small-error #:too-many-descriptors-error
   #:descriptors-lost-error #:corrupt-error #:refused-error #:hung-up-error #:no-listener-error #:in-use-error #:name-error
   #:option-error #:no-channel-error #:not-a-channel-error #:role-taken-error #:no-space-error #:rebooted-error
   #:system-error #:forked-error #:internal-error #:null-error #:closed-handle-error #:wrong-thread-error
   #:not-reserved-error #:reserved-error #:not-received-error #:not-released-error #:sink-error #:not-a-record-file-error
   #:damaged-error #:torn-error
   #:pelton-error #:pelton-error-code #:pelton-error-detail #:channel-ended #:mistake #:sink-error-cause #:system-error-errno
   #:forgotten #:wait-longer #:drop-message #:resume-channel #:try-again #:skip-damage
   ;; any handle
   #:handle #:handle-open-p #:close-handle #:resume #:sync #:drain #:descriptor #:info
   ;; channels
   #:sender #:receiver #:senders #:make-channel #:open-sender #:open-receiver #:open-senders
   #:with-channel #:with-sender #:with-receiver #:with-senders
   #:send #:try-send #:send-sap #:send-batch #:send-descriptors #:trim
   #:with-reserved
   #:receive #:try-receive #:receive-into #:with-received #:do-messages #:do-received #:receive-batch
   #:take-descriptors #:held #:receive-held #:held-sap #:held-size
   ;; appending and flushing
   #:appenders #:open-appenders #:with-appenders #:append-message #:append-sap #:flush
   #:record-file #:runs #:do-runs #:do-records #:map-record-file
   #:flushing #:open-flush #:with-flush #:run-flush
   ;; calls
   #:client #:open-client #:with-client #:call #:with-call #:submit #:await #:cancel #:notify
   #:call-failed #:call-failed-code #:call-failed-octets #:call-abandoned
   #:service #:open-service #:with-service #:serve #:stop
   #:request #:request-octets #:request-pid #:request-uid #:request-cancelled-p #:reply #:reply-part #:fail
   ;; files
   #:engine #:open-engine #:with-engine #:file #:open-file #:with-file #:read-file #:write-file #:sync-file #:truncate-file #:allocate-file
   #:file-status #:list-directory #:make-directory #:remove-directory #:unlink-file #:rename-file #:link-file #:read-file-octets
   #:write-file-octets))
